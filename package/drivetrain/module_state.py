"""A module's state as plain named tensors, and back; a mismatch is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drivetrain.errors import CheckpointError, nearest

_EXTRA = "_extra_state"
"""How torch names what `get_extra_state` gives, behind the module's own name."""


def module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A module's parameters and persistent buffers, and the extra states of modules that have
    `get_extra_state`.

    Returns:
        The tensors by name, an extra state that is a tensor among them; and the other extra states by name.
    """
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extras = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    return tensors, extras


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
        tensors: By the names of the module's state dict.
        extras: The extra states, as `module_state` gave them; a module keeps its own where one is missing.
        where: Where the tensors come from, for messages.
        adopt_dtypes: Give the module's parameters the stored dtypes; without it another dtype is an error.

    Raises:
        CheckpointError: Names are missing or unexpected, or a shape or dtype differs; lists them.
    """
    own = module.state_dict()
    given = {**(extras or {}), **tensors}
    problems = [f"missing {name!r}" for name in sorted(set(own) - set(given)) if not _is_extra(name)]
    problems += [f"unexpected {name!r}{_hint(name, own)}" for name in sorted(set(given) - set(own))]
    for name in sorted(set(own) & set(given)):
        if _is_extra(name):  # a module's own business, of any size and kind
            continue
        mine, stored = own[name], given[name]
        if mine.shape != stored.shape:
            problems.append(f"{name!r} has shape {tuple(stored.shape)} there, {tuple(mine.shape)} here")
        elif mine.dtype != stored.dtype and not adopt_dtypes:
            problems.append(f"{name!r} is {stored.dtype} there, {mine.dtype} here (another precision?)")
    if problems:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        raise CheckpointError(f"the weights of {where} do not fit {type(module).__name__}: {shown}")
    if adopt_dtypes:
        for name, parameter in [*module.named_parameters(), *module.named_buffers()]:
            if name in tensors and parameter.dtype != tensors[name].dtype:
                parameter.data = parameter.data.to(tensors[name].dtype)
    kept = {name: value for name, value in own.items() if _is_extra(name)}
    module.load_state_dict({**kept, **given}, strict=True)


def has_extras(module: nn.Module) -> bool:
    """Whether the module, or one in it, has an extra state."""
    return any(type(each).get_extra_state is not nn.Module.get_extra_state for each in module.modules())


def _is_extra(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA


def _hint(name: str, own: Mapping[str, Any]) -> str:
    if len(own) >= 1000:  # comparing every name with every other would take minutes
        return ""
    meant = nearest(name, own).split("Allowed")[0].strip()
    return f" ({meant})" if meant else ""
