"""A module's state as plain named tensors, and back; a mismatch is an error that names it.

Names are clean: they do not tell how a module is wrapped. `net.0.weight` is called that whether or not
`net` went through `torch.compile`, so that a checkpoint of the one fits the other.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.errors import CheckpointError, nearest

_EXTRA = "_extra_state"
"""How torch names what `get_extra_state` gives, behind the module's own name."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"})
"""What torch.compile, torch's activation checkpointing and torch_xla's FSDP call the module inside."""


def elements(parameter: nn.Parameter) -> int:
    """How many numbers a parameter has, also one that DeepSpeed has divided and left empty here."""
    whole: int = getattr(parameter, "ds_numel", parameter.numel())
    return whole


def clean_name(name: str) -> str:
    """The name of a parameter, buffer or module, as if nothing around it were wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def clean_names(names: Iterable[str], of: str) -> dict[str, str]:
    """Clean names, each with the name that it stands for.

    Args:
        names: Of one state.
        of: Whose they are, for the message.

    Raises:
        CheckpointError: Two names are the same when they are clean.
    """
    clean: dict[str, str] = {}
    for name in names:
        other = clean.setdefault(clean_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{of} has {other!r} and {name!r}, which are both called {clean_name(name)!r} without what "
                f"wrapping adds ({', '.join(sorted(_WRAPPERS))}). Rename one of them"
            )
    return clean


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """The clean name of each parameter, in model order; of a tied one the first of its names.

    Raises:
        CheckpointError: Two parameters have the same clean name.
    """
    own = dict(module.named_parameters())
    return {own[name]: clean for clean, name in clean_names(own, type(module).__name__).items()}


def module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A module's parameters and persistent buffers, and the extra states of modules that have
    `get_extra_state`.

    Returns:
        The tensors by clean name, an extra state that is a tensor among them; and the other extra states by
        name.

    Raises:
        CheckpointError: Two of them have the same clean name.
    """
    state = full_state(module)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extras = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return tensors, extras


def full_state(module: nn.Module) -> dict[str, Any]:
    """The state dict of a module by clean names: tensors, and extra states of any kind."""
    state = module.state_dict()
    return {clean: state[name] for clean, name in clean_names(state, type(module).__name__).items()}


def load_module_state(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    extras: Mapping[str, Any] | None = None,
    *,
    where: str,
    adopt_dtypes: bool = False,
) -> None:
    """Copy named tensors into a module, all or none.

    Args:
        module: Where to.
        tensors: By clean name, all of the module's.
        extras: The extra states, as `module_state` gave them; a module keeps its own where one is missing.
        where: Where the tensors come from, for messages.
        adopt_dtypes: Give the module's parameters the stored dtypes; without it another dtype is an error.

    Raises:
        CheckpointError: Names are missing or unexpected, or a shape or dtype differs; lists them.
    """
    own = full_state(module)
    given = {**(extras or {}), **tensors}
    problems = [f"missing {name!r}" for name in sorted(own.keys() - given.keys()) if not is_extra(name)]
    strangers = sorted(given.keys() - own.keys())
    problems += [f"unexpected {name!r}{hint(name, own)}" for name in strangers[:SHOWN]]
    problems += [f"unexpected {name!r}" for name in strangers[SHOWN:]]
    for name in sorted(own.keys() & given.keys()):
        if is_extra(name):  # a module's own business, of any size and kind
            continue
        mine, stored = own[name], given[name]
        if not is_lazy(mine) and mine.shape != stored.shape:
            problems.append(f"{name!r} has shape {tuple(stored.shape)} there, {tuple(mine.shape)} here")
        elif mine.dtype != stored.dtype and not adopt_dtypes:
            problems.append(f"{name!r} is {stored.dtype} there, {mine.dtype} here (another precision?)")
    if problems:
        raise misfit(module, where, problems)
    put_state(module, given, adopt_dtypes=adopt_dtypes)


SHOWN = 10
"""How many problems a message lists."""


def misfit(module: nn.Module, where: str, problems: list[str]) -> CheckpointError:
    """The error about weights that do not fit a module.

    Args:
        module: Which.
        where: Where the weights come from.
        problems: What does not fit.
    """
    more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    shown = "; ".join(problems[:SHOWN])
    return CheckpointError(f"the weights of {where} do not fit {type(module).__name__}: {shown}{more}")


def put_state(module: nn.Module, given: Mapping[str, Any], *, adopt_dtypes: bool = False) -> None:
    """Copy values that were found to fit into a module, all or none; it keeps what is not given.

    Args:
        module: Where to.
        given: Tensors and extra states by clean name.
        adopt_dtypes: Give the module's parameters and buffers the dtypes of what is given.

    Raises:
        CheckpointError: The module is on the meta device, or does not load what it has itself.
        Exception: A module refuses its extra state.
    """
    state = module.state_dict()
    raw = clean_names(state, type(module).__name__)
    empty = [name for name in given if isinstance(state[raw[name]], Tensor) and state[raw[name]].is_meta]
    if empty:
        raise CheckpointError(
            f"{empty[0]!r} of {type(module).__name__} is on the meta device and has no memory for weights. "
            "Call the module's to_empty(device='cpu') first"
        )
    # An extra state is set by the module's own code, which may refuse it. Nothing else can fail from here on.
    before = copy.deepcopy(state) if any(is_extra(name) for name in given) else None
    replaced = _adopt_dtypes(module, given) if adopt_dtypes else []
    try:
        result = module.load_state_dict({raw[name]: value for name, value in given.items()}, strict=False)
        if result.unexpected_keys:
            raise CheckpointError(
                f"{type(module).__name__} does not load its own {result.unexpected_keys[0]!r}"
            )
    except BaseException:
        for tensor, data in replaced:
            tensor.data = data
        if before is not None:
            module.load_state_dict(before)
        raise


def _adopt_dtypes(module: nn.Module, given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Give parameters and buffers the dtypes of what is given; returns those that changed, and their data."""
    replaced: list[tuple[Tensor, Tensor]] = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = given.get(clean_name(name))
        if value is not None and tensor.dtype != value.dtype:
            replaced.append((tensor, tensor.data))
            tensor.data = tensor.data.to(value.dtype)
    return replaced


def has_extras(module: nn.Module) -> bool:
    """Whether the module, or one in it, has an extra state."""
    return any(type(each).get_extra_state is not nn.Module.get_extra_state for each in module.modules())


def is_extra(name: str) -> bool:
    """Whether it is the name of an extra state."""
    return name.rpartition(".")[2] == _EXTRA


def hint(name: str, own: Collection[str]) -> str:
    """The nearest of the names, in brackets, behind a name that is none of them; nothing if none is near."""
    if len(own) >= 3000:  # comparing with one takes 40 us
        return ""
    meant = nearest(name, own).split("Allowed")[0].strip()
    return f" ({meant})" if meant else ""
