"""An optimizer's state by parameter names: tensors for a tensor file, everything else as JSON.

torch's own `state_dict` numbers the parameters, so that it fits only the same parameters in the same order,
and casts what it loads. Here every slot bears its parameter's name, every shape and dtype is checked, and
nothing is cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError
from drivetrain.quantized_optimizers import PART, from_parts, is_quantized, parts_of
from drivetrain.types import Json

# How an update is computed, not what it computes: the machine that loads decides these for itself.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_NOT_SETTINGS = frozenset({"params", "param_names"}) | _IMPLEMENTATION

# 0-d counters that torch keeps on the CPU, where reading them needs no wait for the device, unless the
# implementation is fused or capturable; see torch.optim.Optimizer.load_state_dict ("step") and
# torch.optim.NAdam ("mu_product").
_COUNTERS = frozenset({"step", "mu_product"})

MASTER = "master"
"""The slot of the float32 copy of a 16-bit weight, where such copies are kept."""

WEIGHT_UPDATES = "weight_updates"
"""The setting of a group that tells how its 16-bit weights take updates; without one, to the nearest."""


def state_by_name(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """The state of an optimizer as tensors and JSON.

    Args:
        optimizer: Any optimizer whose state per parameter holds tensors, numbers and None.
        names: The names of its parameters.

    Returns:
        Tensors by ``"<parameter>/<slot>"`` (the live ones: copy them before the next update), and a JSON
        tree: "optimizer" (the class's name, as mere text), "groups" (settings, and the names under
        "parameters"), "scalars" (by ``"<parameter>/<slot>"``), and "parameters" and "slots", which tell each
        one's dtype and shape; "quantized" lists the slots of which a tensor is stored for each part, by
        ``"<parameter>/<slot>.<part>"``.

    Raises:
        CheckpointError: A parameter without a name, or a value that is neither a tensor nor a number.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Json] = {}
    groups: list[Json] = []
    described: dict[str, Json] = {}
    quantized: list[Json] = []
    for group in optimizer.param_groups:
        members = [_name(parameter, names) for parameter in group["params"]]
        settings = {key: _setting(key, value) for key, value in group.items() if key not in _NOT_SETTINGS}
        groups.append({**settings, "parameters": list(members)})
        for name, parameter in zip(members, group["params"], strict=True):
            described[name] = _describe(parameter)
            # `get`, for reading a missing entry of this defaultdict would make one.
            for slot, value in optimizer.state.get(parameter, {}).items():
                key = _key(name, slot)
                if is_quantized(value):
                    quantized.append(key)
                    tensors.update(parts_of(key, value))
                elif isinstance(value, Tensor):
                    tensors[key] = value.detach()
                else:
                    scalars[key] = _scalar(key, value)
    strangers = [key for key in optimizer.state if key not in names]
    if strangers:
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} has an entry that belongs to no parameter "
            f"({type(strangers[0]).__name__}), and cannot be stored by parameter names"
        )
    slots: dict[str, Json] = {key: _describe(tensor) for key, tensor in tensors.items()}
    meta: dict[str, Json] = {
        "optimizer": type(optimizer).__name__,
        "groups": groups,
        "scalars": scalars,
        "parameters": described,
        "slots": slots,
        "quantized": quantized,
    }
    return tensors, meta


def load_state_by_name(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Take over what `state_by_name` gave, so that training goes on bit for bit.

    Everything is checked before anything is changed. Tensors are copied, to where torch would keep them: with
    their parameter, in its memory layout; counters on the CPU unless the implementation is fused or
    capturable. The settings of the groups come back too (learning rate, betas, ...), but for those that
    choose an implementation.

    Args:
        optimizer: An optimizer of the same kind over the same parameters in the same groups.
        names: The names of its parameters.
        tensors: The tensors, on any device.
        meta: The JSON tree.

    Raises:
        CheckpointError: The optimizer's kind, a parameter, a group, a shape or a dtype differs; names it.
    """
    saved = _read(meta)
    if saved["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint's optimizer is {saved['optimizer']!r}, this run's is "
            f"{type(optimizer).__name__!r}. Resume with the same optimizer, or load the weights only"
        )
    _check_parameters(optimizer, names, saved["parameters"])
    pairs = _match_groups(optimizer, names, saved["groups"])
    _check_updates(pairs)
    _check_tensors(tensors, saved["slots"])
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in (*saved["slots"], *saved["scalars"]):
        name, _, slot = key.rpartition("/")
        if name not in saved["parameters"]:
            raise CheckpointError(f"the checkpoint's optimizer state {key!r} belongs to no parameter")
        state[name][slot] = tensors[key] if key in saved["slots"] else saved["scalars"][key]
    _check_fused(pairs, names, state)
    _assemble(optimizer, names, state, saved["quantized"])

    for group, settings in pairs:
        for key, value in settings.items():
            if key != "parameters" and key not in _NOT_SETTINGS:
                group[key] = _restored(group.get(key), value)
    optimizer.state.clear()
    with torch.no_grad():
        for group, _ in pairs:
            for parameter in group["params"]:
                slots = state.get(names[parameter])
                if slots:
                    optimizer.state[parameter] = {
                        slot: _placed(value, slot, parameter, group) for slot, value in slots.items()
                    }


def _name(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise CheckpointError(
            f"the optimizer trains a parameter of shape {tuple(parameter.shape)} that the model does not "
            "name. Give the optimizer the parameters of the model itself"
        ) from None


def _key(name: str, slot: object) -> str:
    if not isinstance(slot, str) or "/" in slot:
        raise CheckpointError(
            f"the optimizer's state of {name!r} has the slot {slot!r}, which is no plain name"
        )
    return f"{name}/{slot}"


def _describe(tensor: Tensor) -> str:
    """Dtype and shape as text: ``float32[64, 10]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _scalar(key: str, value: object) -> Json:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"the optimizer's state {key!r} is a {type(value).__name__}, which cannot be stored. "
        "Allowed: tensors, numbers, text and None"
    )


def _setting(key: str, value: object) -> Json:
    """A group's setting as JSON; a tensor of one element becomes its number, a tuple a list."""
    if isinstance(value, (tuple, list)):
        return [_setting(key, each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return _scalar(key, value.item())
    return _scalar(f"setting {key}", value)


def _restored(present: object, value: Any) -> Any:
    """A setting from JSON, in the type it has in the optimizer at hand."""
    if isinstance(present, Tensor):
        return present.fill_(value)  # in place: a captured graph may hold on to this tensor
    if isinstance(value, list) and not isinstance(present, list):
        old = present if isinstance(present, tuple) and len(present) == len(value) else (None,) * len(value)
        return tuple(_restored(before, after) for before, after in zip(old, value, strict=True))
    return value


def _placed(value: Any, slot: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """A slot's value where the optimizer wants it; always a copy, for the optimizer will write to it."""
    if not isinstance(value, Tensor) or is_quantized(value):
        return value
    if slot in _COUNTERS and value.ndim == 0:
        if group.get("fused") or group.get("capturable"):
            # The kernels read a float32. A counter of a float64 run is a whole number, exact in both.
            dtype = torch.float32 if slot == "step" else value.dtype
            return value.to(device=parameter.device, dtype=dtype, copy=True)
        return value.to(device="cpu", copy=True)
    if value.shape == parameter.shape:
        # In the parameter's strides (channels_last, say), as the optimizer makes it: fused kernels rely on
        # that.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(device=parameter.device, copy=True)


def _assemble(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    state: Mapping[str, dict[str, Any]],
    quantized: list[Any],
) -> None:
    """Put quantized tensors in the place of their parts."""
    parameters = {names[each]: each for group in optimizer.param_groups for each in group["params"]}
    for key in quantized:
        name, _, slot = str(key).rpartition("/")
        slots = state.get(name, {})
        found = [each for each in slots if each.startswith(f"{slot}{PART}")]
        if not found or name not in parameters:
            raise CheckpointError(f"the checkpoint's optimizer state lacks the parts of {key!r}")
        parts = {each.removeprefix(f"{slot}{PART}"): slots.pop(each) for each in found}
        slots[slot] = from_parts(optimizer, parameters[name], slot, parts)


def _read(meta: Mapping[str, Any]) -> dict[str, Any]:
    meta = {"quantized": [], **meta}  # which earlier versions had none of
    kinds = {
        "optimizer": str,
        "groups": list,
        "scalars": dict,
        "parameters": dict,
        "slots": dict,
        "quantized": list,
    }
    for key, kind in kinds.items():
        if not isinstance(meta.get(key), kind):
            raise CheckpointError(f"the checkpoint's optimizer state has no {kind.__name__} {key!r}")
    for group in meta["groups"]:
        members = group.get("parameters") if isinstance(group, dict) else None
        if not isinstance(members, list) or not all(isinstance(name, str) for name in members):
            raise CheckpointError(
                "the checkpoint's optimizer state has a group without the names 'parameters'"
            )
    return {key: meta[key] for key in kinds}


def _check_parameters(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: Mapping[str, str]
) -> None:
    present = {_name(each, names): each for group in optimizer.param_groups for each in group["params"]}
    for name in present:
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no optimizer state for the parameter {name!r}")
    for name, description in saved.items():
        if name not in present:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {name!r}, which this optimizer does not train"
            )
        if description != _describe(present[name]):
            raise CheckpointError(
                f"the parameter {name!r} is {_describe(present[name])}, in the checkpoint it is {description}"
            )


def _match_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of the optimizer with the saved one that holds the same parameters."""
    owner = {name: index for index, group in enumerate(saved) for name in group["parameters"]}
    pairs = []
    for group in optimizer.param_groups:
        members = [names[parameter] for parameter in group["params"]]
        if not members:
            continue
        index = owner.get(members[0])
        other = [] if index is None else saved[index]["parameters"]
        different = sorted(set(members) ^ set(other))
        if index is None or different:
            raise CheckpointError(
                f"the parameter {(different or members)[0]!r} is in another parameter group than in the "
                "checkpoint. Resume with the same groups, or load the weights only"
            )
        pairs.append((group, saved[index]))
    return pairs


def _check_updates(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Refuse the state of 16-bit weights that were updated in another way, which is of other dtypes."""
    for group, settings in pairs:
        mine, theirs = (str(each.get(WEIGHT_UPDATES, "nearest")) for each in (group, settings))
        if mine != theirs:
            raise CheckpointError(
                f"the checkpoint's 16-bit weights were updated by {theirs!r}, this run's are by {mine!r}, and"
                f" the optimizers' states differ. Resume with Precision(updates={theirs!r}), such as"
                f" precision='bf16-true-{theirs}', or load the weights only"
            )


def _check_fused(
    pairs: Iterable[tuple[dict[str, Any], object]],
    names: Mapping[nn.Parameter, str],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Refuse shapes that a fused kernel, which compares none, would read and write beyond."""
    for group, _ in pairs:
        for parameter in group["params"] if group.get("fused") else ():
            for slot, value in state.get(names[parameter], {}).items():
                shape = () if slot in _COUNTERS else tuple(parameter.shape)
                if isinstance(value, Tensor) and tuple(value.shape) != shape:
                    raise CheckpointError(
                        f"the checkpoint's optimizer state '{names[parameter]}/{slot}' is "
                        f"{_describe(value)}, and should be of shape {list(shape)}"
                    )


def _check_tensors(tensors: Mapping[str, Tensor], slots: Mapping[str, str]) -> None:
    for key in tensors:
        if key not in slots:
            raise CheckpointError(f"the checkpoint's optimizer state has an unexpected tensor {key!r}")
    for key, description in slots.items():
        if key not in tensors:
            raise CheckpointError(f"the checkpoint's optimizer state lacks the tensor {key!r}")
        if _describe(tensors[key]) != description:
            raise CheckpointError(
                f"the checkpoint's optimizer state {key!r} is {_describe(tensors[key])}, "
                f"and should be {description}"
            )
