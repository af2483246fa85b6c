"""An optimizer's state by parameter names: tensors for a tensor file, everything else as JSON.

torch's own `state_dict` numbers the parameters, so that it fits only the same parameters in the same order,
and casts what it loads. Here every slot has its parameter's name, every shape and dtype is checked, and
nothing is cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json
from drivetrain.task.optim.quantized import PART, from_parts, is_quantized, parts_of

# Settings of how an update is computed: the machine that loads chooses these itself.
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
_NOT_SETTINGS = frozenset({"params", "param_names"}) | _IMPLEMENTATION

# 0-d counters that torch keeps on the CPU, where reading them needs no wait for the device, unless the
# implementation is fused or capturable. See torch.optim.Optimizer.load_state_dict ("step") and
# torch.optim.NAdam ("mu_product").
_COUNTERS = frozenset({"step", "mu_product"})

MASTER = "master"
"""The slot of the float32 copy of a 16-bit weight, if copies are kept."""

AVERAGE = "weight_average_"
"""The beginning of the slots of the weights' averages, which a checkpoint has and training does not."""

TRAINED = AVERAGE + "trained"
"""The slot of the trained weight in a checkpoint whose weights are the averages."""

WEIGHT_UPDATES = "weight_updates"
"""The group setting for updates of 16-bit weights; without it they are rounded to the nearest."""


def state_by_name(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return the state of an optimizer as tensors and JSON.

    Returns:
        Two mappings. Tensors by ``"<parameter>/<slot>"``, live ones: copy them before the next step. And a
        JSON tree: "optimizer" (the class's name, for comparison), "groups" (settings, and the names under
        "parameters"), "scalars" (by ``"<parameter>/<slot>"``), "parameters" and "slots" (their dtypes and
        shapes), and "quantized" (the slots whose tensors are stored in parts, by
        ``"<parameter>/<slot>.<part>"``).
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Json] = {}
    groups: list[Json] = []
    parameters: dict[str, Json] = {}
    quantized: list[Json] = []
    for group in optimizer.param_groups:
        members = [_name(parameter, names) for parameter in group["params"]]
        settings = {key: _setting(key, value) for key, value in group.items() if key not in _NOT_SETTINGS}
        groups.append({**settings, "parameters": list(members)})
        for name, parameter in zip(members, group["params"], strict=True):
            parameters[name] = described(parameter)
            # `get`, because reading a missing entry of this defaultdict would make one.
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
    slots: dict[str, Json] = {key: described(tensor) for key, tensor in tensors.items()}
    meta: dict[str, Json] = {
        "optimizer": type(optimizer).__name__,
        "groups": groups,
        "scalars": scalars,
        "parameters": parameters,
        "slots": slots,
        "quantized": quantized,
    }
    return tensors, meta


def _state_by_parameter(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stored tensors and numbers by their parameter's name and their slot."""
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in (*meta["slots"], *meta["scalars"]):
        name, _, slot = key.rpartition("/")
        if name not in meta["parameters"]:
            raise CheckpointError(f"the checkpoint's optimizer state {key!r} belongs to no parameter")
        state[name][slot] = tensors[key] if key in meta["slots"] else meta["scalars"][key]
    return state


def load_state_by_name(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Restore what `state_by_name` returned, so that training continues bit for bit.

    Everything is checked before anything is changed. Tensors are copied to where torch would keep them: with
    their parameter, in its memory layout; counters on the CPU unless the implementation is fused or
    capturable. The settings of the groups (learning rate, betas, ...) are restored too, except those that
    choose an implementation.

    Args:
        optimizer: An optimizer of the same kind over the same parameters in the same groups.
    """
    _require_same(
        _tree(meta),
        _tree(state_by_name(optimizer, names)[1]),
        "Resume with the same optimizer over the same parameters, or load the weights only",
    )
    _require_same(
        {f"the tensor {key!r}": text for key, text in meta["slots"].items()},
        {f"the tensor {key!r}": described(each) for key, each in tensors.items()},
        "The checkpoint's list of tensors and its tensors differ: it is damaged",
    )
    settings_of = {name: group for group in meta["groups"] for name in group["parameters"]}
    pairs = [
        (group, settings_of[names[group["params"][0]]]) for group in optimizer.param_groups if group["params"]
    ]
    state = _state_by_parameter(tensors, meta)
    _check_fused(optimizer, names, state)
    _assemble(optimizer, names, state, meta["quantized"])

    for group, settings in pairs:
        for key, value in settings.items():
            if key != "parameters" and key not in _NOT_SETTINGS:
                group[key] = restored_setting(group.get(key), value)
    optimizer.state.clear()
    with torch.no_grad():
        for group, _ in pairs:
            for parameter in group["params"]:
                slots = state.get(names[parameter])
                if slots:
                    optimizer.state[parameter] = {
                        slot: _placed(value, slot, parameter, group) for slot, value in slots.items()
                    }
    start_momenta(optimizer)


def start_momenta(optimizer: Optimizer) -> None:
    """Give every trained parameter of torch's fused SGD a momentum, which is zero at first.

    The fused kernel takes the momenta of all parameters that have a gradient, or of none. A parameter may get
    its first gradient later than others, as an expert does that the first samples do not use. Without
    dampening, a first step from zero makes the gradient the momentum, as a first step from none does. With
    dampening it does not, so such groups are left as they are.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        momentum = group.get("initial_momentum", group["momentum"])  # a schedule may be at 0 now
        if not (group["fused"] and momentum) or group["dampening"]:
            continue
        wide = torch.float32 if group.get(WEIGHT_UPDATES, "nearest") != "nearest" else None
        for each in group["params"]:
            if each.requires_grad and optimizer.state.get(each, {}).get("momentum_buffer") is None:
                dtype = wide if each.itemsize < 4 else None
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each.detach(), dtype=dtype)


def take_averages(optimizer: Optimizer) -> dict[str, dict[nn.Parameter, Tensor]]:
    """Remove the slots of the weights' averages from an optimizer's state, and return them by slot."""
    found: dict[str, dict[nn.Parameter, Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            slots = optimizer.state.get(parameter, {})
            ours = [each for each in slots if each.startswith(AVERAGE)]
            for slot in ours:
                found.setdefault(slot, {})[parameter] = slots.pop(slot)
            if ours and not slots:  # an optimizer takes a parameter without an entry for a new one
                del optimizer.state[parameter]
    return found


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
            f"the optimizer's state of {name!r} has the slot {slot!r}, which is not a plain name"
        )
    return f"{name}/{slot}"


def described(tensor: Tensor) -> str:
    """Return dtype and shape as text: ``float32[64, 10]``."""
    return _described(tensor.dtype, tensor.shape)


@lru_cache(maxsize=4096)  # a save describes each parameter and slot
def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _scalar(key: str, value: object) -> Json:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"the optimizer's state {key!r} is a {type(value).__name__}, which cannot be stored. "
        "Allowed: tensors, numbers, text and None"
    )


def _setting(key: str, value: object) -> Json:
    """Return a group's setting as JSON; a tensor of one element becomes its number, a tuple a list."""
    if isinstance(value, (tuple, list)):
        return [_setting(key, each) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return _scalar(key, value.item())
    return _scalar(f"setting {key}", value)


def is_setting(name: str) -> bool:
    """Return whether an entry of a group is a setting that a checkpoint stores."""
    return name not in _NOT_SETTINGS


def restored_setting(present: object, value: Any) -> Any:
    """Return a setting from JSON, in the type that the optimizer has now."""
    if isinstance(present, Tensor):
        return present.fill_(value)  # in place: a captured graph may hold this tensor
    if isinstance(value, list) and not isinstance(present, list):
        old = present if isinstance(present, tuple) and len(present) == len(value) else (None,) * len(value)
        return tuple(restored_setting(before, after) for before, after in zip(old, value, strict=True))
    return value


def _placed(value: Any, slot: str, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Return a copy of a slot's value on the device that the optimizer expects."""
    if not isinstance(value, Tensor) or is_quantized(value):
        return value
    if slot in _COUNTERS and value.ndim == 0:
        if group.get("fused") or group.get("capturable"):
            # The kernels read a float32. A counter of a float64 run is a whole number, exact in both.
            dtype = torch.float32 if slot == "step" else value.dtype
            return value.to(device=parameter.device, dtype=dtype, copy=True)
        return value.to(device="cpu", copy=True)
    if value.shape == parameter.shape:
        # In the parameter's strides (channels_last, for example), as the optimizer makes it: fused kernels
        # rely on that.
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(device=parameter.device, copy=True)


def _assemble(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    state: Mapping[str, dict[str, Any]],
    quantized: list[Any],
) -> None:
    """Replace the parts of quantized tensors by the tensors."""
    parameters = {names[each]: each for group in optimizer.param_groups for each in group["params"]}
    for key in quantized:
        name, _, slot = str(key).rpartition("/")
        slots = state.get(name, {})
        found = [each for each in slots if each.startswith(f"{slot}{PART}")]
        if not found or name not in parameters:
            raise CheckpointError(f"the checkpoint's optimizer state lacks the parts of {key!r}")
        parts = {each.removeprefix(f"{slot}{PART}"): slots.pop(each) for each in found}
        slots[slot] = from_parts(optimizer, parameters[name], slot, parts)


def _tree(meta: Mapping[str, Any]) -> dict[str, str]:
    """Return a description of an optimizer's parameters and groups, by the name of each part."""
    tree = {"the optimizer": repr(meta["optimizer"])}
    tree.update({f"the parameter {name!r}": text for name, text in meta["parameters"].items()})
    for number, group in enumerate(meta["groups"]):
        updates = str(group.get(WEIGHT_UPDATES, "nearest"))
        for name in group["parameters"]:
            tree[f"the parameter group of {name!r}"] = f"number {number}, of {min(group['parameters'])!r}"
            tree[f"the way to update {name!r}"] = f"Precision(updates={updates!r})"
    return tree


def _require_same(there: Mapping[str, str], here: Mapping[str, str], remedy: str) -> None:
    """Check that a checkpoint's optimizer state and the present one have the same description."""
    for name in sorted({*there, *here}):  # the optimizer, then parameters, then groups
        theirs, ours = there.get(name, "not there"), here.get(name, "not there")
        if theirs != ours:
            if name.startswith("the parameter group of"):
                remedy = (
                    "List the groups in the checkpoint's order. Weights with decay and weights without it are"
                    " separate groups. They change if weight_decay becomes zero or stops being zero, or if a"
                    " ParameterGroup changes. To end the decay in a resume, give weight_decay=1e-30 with"
                    f" optimizer_settings='program', which keeps the groups. {remedy}"
                )
            raise CheckpointError(
                f"the optimizer state does not fit: in the checkpoint {name} is {theirs}, here {ours}."
                f" {remedy}"
            )


def _check_fused(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check the shapes for a fused kernel, which checks none and would read and write out of bounds."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            slots = state.get(names[parameter], {})
            for slot, value in slots.items():
                what = f"the shape of {names[parameter]}/{slot}"
                wanted = [] if slot in _COUNTERS else list(parameter.shape)
                if isinstance(value, Tensor):
                    beyond = "A fused kernel would read beyond it: load the weights only"
                    _require_same({what: str(list(value.shape))}, {what: str(wanted)}, beyond)
