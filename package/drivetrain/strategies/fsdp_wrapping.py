"""Which parts of a model are gathered and freed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from drivetrain.errors import ConfigError, nearest

Wrap = str | int | tuple[str, ...] | Callable[[nn.Module], bool]
"""How a user says it; see `FSDPConfig.wrap`."""


def units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules that are gathered each by itself, inner ones before those that contain them.

    Raises:
        ConfigError: A class of which the model has none; lists the nearest. Or a container, such as a
            `ModuleList`.
    """
    if wrap == "auto":
        return repeated_blocks(model)
    if isinstance(wrap, (tuple, list)):
        chosen = _of_classes(model, wrap)
    elif isinstance(wrap, int):
        chosen = _by_size(model, wrap)
    else:
        assert callable(wrap)
        chosen = [each for each in model.modules() if each is not model and wrap(each)]
    for each in chosen:
        if not _is_called(each):
            raise ConfigError(
                f"a {type(each).__name__} is never called itself, so that nothing would be gathered: wrap"
                " what is in it"
            )
    return _separate(model, chosen[::-1])


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest blocks that occur more than once in a list of modules, in the order of the model."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones first
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        children = list(module.children())
        kinds = Counter(type(each) for each in children if any(True for _ in each.parameters()))
        for child in children:
            composed = any(True for _ in child.children())
            if composed and kinds[type(child)] > 1 and _is_called(child):
                found.append(child)
                inside.update(id(each) for each in child.modules())
    return _separate(model, found)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with weights of their own: these must have the dtype of the running means, while all
    other weights are gathered in the computing dtype.
    """
    kind = nn.modules.batchnorm._BatchNorm
    found = [
        each for each in model.modules() if isinstance(each, kind) and any(True for _ in each.parameters())
    ]
    return _separate(model, found)


def _of_classes(model: nn.Module, names: tuple[str, ...] | list[str]) -> list[nn.Module]:
    present = {type(each).__name__ for each in model.modules()}
    for name in names:
        if name not in present:
            raise ConfigError(f"the model has no module of the class {name!r}. {nearest(name, present)}")
    return [each for each in model.modules() if each is not model and type(each).__name__ in names]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules that have as many parameters without those of units inside of them."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        if isinstance(module, nn.MultiheadAttention):
            # It uses an inner module's weights without calling it, and gives back a view, which torch warns
            # of: it belongs to the module around it.
            return sum(each.numel() for each in module.parameters())
        own = sum(each.numel() for each in module.parameters(recurse=False))
        own += sum(visit(child) for child in module.children())
        if module is not model and _is_called(module) and own >= least:
            chosen.append(module)
            return 0
        return own

    visit(model)
    return chosen[::-1]


def _is_called(module: nn.Module) -> bool:
    """Whether it may have a forward; gathering happens there."""
    return (
        not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        or type(module).forward is not nn.Module.forward
    )


def _separate(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that share no parameter with the rest of the model: tied parameters must be gathered together."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    separate = []
    for module in modules:
        own = {id(each) for each in module.modules()}
        if all(users[id(parameter)] <= own for parameter in module.parameters()):
            separate.append(module)
    return separate
