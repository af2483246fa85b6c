"""Which modules are gathered and freed together, and which parameters are never sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.task.blocks import is_called, repeated_blocks, separate
from drivetrain.task.model_info import info_of
from drivetrain.task.optim.groups import names_matching

Wrap = str | int | tuple[str, ...] | Callable[[nn.Module], bool]
"""A user's choice of modules; see `FSDPConfig.wrap`."""


def are_names(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value)


def check_wrap(kind: str, wrap: Wrap) -> None:
    """Check the option `wrap` of a configuration."""
    is_count = isinstance(wrap, int) and not isinstance(wrap, bool) and wrap > 0
    if not (wrap == "auto" or are_names(wrap) or is_count or callable(wrap)):
        raise ConfigError(
            f"{kind}(wrap=...) must be 'auto', names of classes, a number of parameters or a function of a"
            f" module, not {wrap!r}"
        )


def units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """Return the modules to gather one at a time, inner modules before those that contain them."""
    if wrap == "auto":
        named = named_blocks(model)
        return separate(model, named) if named else repeated_blocks(model)
    if isinstance(wrap, (tuple, list)):
        chosen = _of_classes(model, wrap)
    elif isinstance(wrap, int):
        chosen = _by_size(model, wrap)
    else:
        assert callable(wrap)
        chosen = [each for each in model.modules() if each is not model and wrap(each)]
    for each in chosen:
        if not is_called(each):
            raise ConfigError(
                f"a {type(each).__name__} is never called itself, so nothing would be gathered: wrap the"
                " modules in it"
            )
    return separate(model, chosen[::-1])


def around(
    model: nn.Module, blocks: Sequence[nn.Module], others: Sequence[nn.Module] = ()
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the embeddings and the heads to gather on their own, before and after the blocks.

    They are an `nn.Embedding` and an `nn.Linear` whose weights have one shape. An embedding without a head,
    as of positions, is often used without being called, so it stays with the whole model. So does a head with
    a bias: torch returns a view of its product with inputs of three dimensions, and an operation in place on
    that view would lose FSDP's hook, of which torch 2.13 warns.

    Args:
        model: The model.
        blocks: The modules that are gathered apart already; what is inside of them is left out.
        others: Further modules that are left out, such as those that tensor parallelism splits.
    """
    inside = {id(each) for other in (*blocks, *others) for each in other.modules()}
    outside = [each for each in model.modules() if id(each) not in inside]
    embeddings = [each for each in outside if type(each) is nn.Embedding]
    heads = [each for each in outside if type(each) is nn.Linear]
    shapes = {each.weight.shape for each in embeddings} & {each.weight.shape for each in heads}
    return (
        separate(model, [each for each in embeddings if each.weight.shape in shapes]),
        separate(model, [each for each in heads if each.weight.shape in shapes and each.bias is None]),
    )


Use = tuple[nn.Module, str]
"""A module that holds a parameter itself, and the parameter's name there."""


def uses_of_parameters(model: nn.Module) -> list[list[Use]]:
    """Return the uses of each parameter; a tied one has several."""
    uses: dict[int, list[Use]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            uses.setdefault(id(parameter), []).append((module, name))
    return list(uses.values())


def tie(uses: Sequence[Use]) -> None:
    """Give all uses the parameter of the first one."""
    (first, name), *others = uses
    for module, other in others:
        setattr(module, other, getattr(first, name))


def apply_tied(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the tensors of a module as torch's `_apply` does, and keep tied parameters tied.

    Where torch cannot change a parameter in place, it makes one for each use.
    """
    uses = uses_of_parameters(module)
    module._apply(function)  # type: ignore[no-untyped-call]
    for each in uses:
        tie(each)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the batch norms that have weights.

    Their weights must have the dtype of the running means; all other weights are gathered in the compute
    dtype.
    """
    kind = nn.modules.batchnorm._BatchNorm
    found = [
        each for each in model.modules() if isinstance(each, kind) and any(True for _ in each.parameters())
    ]
    return separate(model, found)


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of the classes that a task names in its `ModelInfo`, without those inside others."""
    names = frozenset(info_of(model).block_classes)
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules() if names else ():
        if id(module) not in inside and type(module).__name__ in names and is_called(module):
            found.append(module)
            inside.update(id(each) for each in module.modules())
    return found


def _of_classes(model: nn.Module, names: tuple[str, ...] | list[str]) -> list[nn.Module]:
    present = {type(each).__name__ for each in model.modules()}
    for name in names:
        if name not in present:
            raise ConfigError(f"the model has no module of the class {name!r}. {nearest(name, present)}")
    return [each for each in model.modules() if each is not model and type(each).__name__ in names]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return the modules with at least that many parameters, not counting those of chosen inner modules."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        if isinstance(module, nn.MultiheadAttention):
            # It uses an inner module's weights without calling that module, and returns a view, which torch
            # warns about. So it belongs to the module around it.
            return sum(each.numel() for each in module.parameters())
        own = sum(each.numel() for each in module.parameters(recurse=False))
        own += sum(visit(child) for child in module.children())
        if module is not model and is_called(module) and own >= least:
            chosen.append(module)
            return 0
        return own

    visit(model)
    return chosen[::-1]


def ignored_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters that match a pattern, or belong to a module that matches."""
    return frozenset().union(*(names_matching(model, each, f"ignored={each!r}") for each in patterns))


def indivisible_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that have nothing to shard: scalars, and those without elements."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.ndim == 0 or 0 in parameter.shape)


def parameters_named(model: nn.Module, names: frozenset[str]) -> set[nn.Parameter]:
    """Return the parameters that have these names now."""
    if not names:
        return set()
    return {each for name, each in model.named_parameters(remove_duplicate=False) if name in names}
