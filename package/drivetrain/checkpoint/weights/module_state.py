"""Convert a module's state to plain named tensors, and back; mismatches raise an error that names them.

Names are clean: they lack the parts that wrappers add. `net.0.weight` has this name whether or not `net` went
through `torch.compile`, so that a checkpoint of the one fits the other.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.core.errors import CheckpointError, nearest
from drivetrain.core.messages import logger

_LOG = logger(__name__)

_EXTRA = "_extra_state"
"""torch's name for the result of `get_extra_state`, after the module's name."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"})
"""Names of the inner module in torch.compile, torch's activation checkpointing and torch_xla's FSDP."""


def elements(parameter: nn.Parameter) -> int:
    """Return a parameter's number of elements, even if DeepSpeed has sharded it and left it empty here."""
    whole: int = getattr(parameter, "ds_numel", parameter.numel())
    return whole


def clean_name(name: str) -> str:
    """Return the name of a parameter, buffer or module without the parts that wrappers add."""
    if "._" not in name and not name.startswith("_"):  # as all of these parts do: 0.1 us, not 2
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def clean_names(names: Iterable[str], of: str) -> dict[str, str]:
    """Return clean names, each with its original name.

    Args:
        names: The names in one state.
        of: The state's owner, for the message.

    Raises:
        CheckpointError: Two names have the same clean name.
    """
    clean: dict[str, str] = {}
    for name in names:
        other = clean.setdefault(clean_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{of} has {other!r} and {name!r}, which are both called {clean_name(name)!r} without the "
                f"parts that wrappers add ({', '.join(sorted(_WRAPPERS))}). Rename one of them"
            )
    return clean


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the clean name of each parameter, in model order; for a tied one, its first name.

    Raises:
        CheckpointError: Two parameters have the same clean name.
    """
    own = dict(module.named_parameters())
    return {own[name]: clean for clean, name in clean_names(own, type(module).__name__).items()}


def module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a module's parameters and persistent buffers, and the extra states of its modules.

    Returns:
        The tensors by clean name, including extra states that are tensors; and the other extra states by
        name, with None for each persistent buffer that is None.

    Raises:
        CheckpointError: Two of them have the same clean name.
    """
    state = full_state(module)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    extras = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    empty = [
        name for name, (owner, key) in _persistent_buffers(module).items() if owner._buffers[key] is None
    ]
    return tensors, {**extras, **dict.fromkeys(empty)}


def full_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of a module by clean names: tensors, and extra states of any type."""
    state = module.state_dict()
    return {clean: state[name] for clean, name in clean_names(state, type(module).__name__).items()}


def _problems(
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    buffers: Collection[str],
    kept: Collection[str],
    adopt_dtypes: bool,
) -> list[str]:
    """Return what of the given state does not fit a module's own."""
    lacking = sorted(own.keys() - given.keys() - set(kept))
    problems = [f"missing {name!r}" for name in lacking if not is_extra(name)]
    strangers = sorted(given.keys() - own.keys() - set(buffers))
    problems += [f"unexpected {name!r}{hint(name, own)}" for name in strangers[:SHOWN]]
    problems += [f"unexpected {name!r}" for name in strangers[SHOWN:]]
    for name in sorted(own.keys() & given.keys()):
        if is_extra(name):  # the module checks it itself; it may have any size and type
            continue
        mine, stored = own[name], given[name]
        if name not in buffers and not is_lazy(mine) and mine.shape != stored.shape:
            problems.append(f"{name!r} has shape {tuple(stored.shape)} there, {tuple(mine.shape)} here")
        elif name not in buffers and mine.dtype != stored.dtype and not adopt_dtypes:
            problems.append(f"{name!r} is {stored.dtype} there, {mine.dtype} here (another precision?)")
    if given and own and not own.keys() & given.keys():
        problems.insert(0, "it is a checkpoint of another task: none of its names is a name in this task")
    return problems


def load_module_state(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    extras: Mapping[str, Any] | None = None,
    *,
    where: str,
    adopt_dtypes: bool = False,
    kept: Collection[str] = (),
) -> None:
    """Copy named tensors into a module, all or none; a buffer becomes None, or gets another shape or dtype.

    Args:
        module: The module to fill.
        tensors: The tensors by clean name, all of the module's.
        extras: The extra states, as `module_state` returned them; modules without one keep theirs.
        where: The source of the tensors, for messages.
        adopt_dtypes: Give the module's parameters the stored dtypes; otherwise a different dtype raises.
        kept: Names that need not be given; those keep the module's values.

    Raises:
        CheckpointError: Names are missing or unexpected, or a shape or dtype differs; lists them.
    """
    buffers, given = _persistent_buffers(module), {**(extras or {}), **tensors}
    none = {name for name, value in given.items() if value is None and not is_extra(name)}
    empty = sorted(none & {name for name, (owner, key) in buffers.items() if owner._buffers[key] is not None})
    given = {name: value for name, value in given.items() if name not in none}
    own = {name: value for name, value in full_state(module).items() if name not in none}
    problems = _problems(own, given, buffers, kept, adopt_dtypes)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        shown = "; ".join(problems[:SHOWN])
        raise CheckpointError(f"the weights of {where} do not fit {type(module).__name__}: {shown}{more}")
    for name in buffers.keys() & tensors.keys():
        owner, key = buffers[name]
        mine, stored = owner._buffers[key], tensors[name]
        if mine is None or (not is_lazy(mine) and (mine.shape, mine.dtype) != (stored.shape, stored.dtype)):
            near = mine if mine is not None else next(module.parameters(), stored)
            owner._buffers[key] = torch.empty(stored.shape, dtype=stored.dtype, device=near.device)
    put_state(module, given, adopt_dtypes=adopt_dtypes)
    for name in empty:
        owner, key = buffers[name]
        owner._buffers[key] = None
        _LOG.warning(f"the buffer {name!r} is None in {where}, and so it is here")


def _persistent_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the name there of each persistent buffer, those that are None included."""
    return {
        clean_name(f"{path}.{key}" if path else key): (owner, key)
        for path, owner in module.named_modules()
        for key in owner._buffers
        if key not in owner._non_persistent_buffers_set
    }


SHOWN = 10
"""The most problems that a message lists."""


def put_state(module: nn.Module, given: Mapping[str, Any], *, adopt_dtypes: bool = False) -> None:
    """Copy values that fit into a module, all or none; other values of the module stay.

    Args:
        module: The module to fill.
        given: Tensors and extra states by clean name.
        adopt_dtypes: Give the module's parameters and buffers the dtypes of the given values.

    Raises:
        CheckpointError: The module is on the meta device, or does not load one of its own names.
        Exception: A module rejects its extra state.
    """
    state = module.state_dict()
    raw = clean_names(state, type(module).__name__)
    empty = [name for name in given if isinstance(state[raw[name]], Tensor) and state[raw[name]].is_meta]
    if empty:
        raise CheckpointError(
            f"{empty[0]!r} of {type(module).__name__} is on the meta device and has no memory for weights. "
            "Call the module's to_empty(device='cpu') first"
        )
    # The module's code sets an extra state, and may reject it. Nothing else can fail from here on.
    before = copy.deepcopy(state) if any(is_extra(name) for name in given) else None
    replaced = _adopt_dtypes(module, given) if adopt_dtypes else []
    try:
        result = module.load_state_dict({raw[name]: value for name, value in given.items()}, strict=False)
        if result.unexpected_keys:
            raise CheckpointError(f"{type(module).__name__} does not load its {result.unexpected_keys[0]!r}")
    except BaseException:
        for tensor, data in replaced:
            tensor.data = data
        if before is not None:
            module.load_state_dict(before)
        raise


def _adopt_dtypes(module: nn.Module, given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Give parameters and buffers the given dtypes; return those that changed, with their old data."""
    replaced: list[tuple[Tensor, Tensor]] = []
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = given.get(clean_name(name))
        if value is not None and tensor.dtype != value.dtype:
            replaced.append((tensor, tensor.data))
            tensor.data = tensor.data.to(value.dtype)
    return replaced


def is_extra(name: str) -> bool:
    """Return whether a name is that of an extra state."""
    return name.rpartition(".")[2] == _EXTRA


def hint(name: str, own: Collection[str]) -> str:
    """Return a hint in brackets with the nearest of the names, or "" if none is near."""
    if len(own) >= 3000:  # comparing with one takes 40 us
        return ""
    meant = nearest(name, own).split("Allowed")[0].strip()
    return f" ({meant})" if meant else ""
