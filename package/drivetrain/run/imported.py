"""Resuming from an imported checkpoint of another program: its weights, moments and counts.

An imported checkpoint has no seed, no position in the data, and no state of schedules, callbacks or loggers.
The optimizer's settings and the learning rate come from the task; only the moments come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.weights.module_state import load_module_state, parameter_names
from drivetrain.checkpoint.weights.rename import prefix_hint
from drivetrain.core.errors import CheckpointError
from drivetrain.core.messages import logger
from drivetrain.run.run import Run
from drivetrain.task.optim.state import described, load_state_by_name, state_by_name

_LOG = logger(__name__)

_ADAM = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"})
_COMPARED = ("betas", "eps", "weight_decay", "amsgrad")


def restore_imported(run: Run, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
    """Start a run from an imported checkpoint, at its update and at the beginning of epoch 0.

    Raises:
        CheckpointError: The task's weights or trained parameters are others, or its optimizer is not Adam.
    """
    engine = run.engine
    weights, slots = snapshot.tensors["model"], snapshot.tensors["optimizer"]
    with engine.exchanged(write=True) as optimizers:
        _check_names(run.task, weights)
        names = parameter_names(run.task)
        taken = {name: _own_slots(each, names, slots) for name, each in optimizers.items()}
        _check_all_taken(slots, taken)
        load_module_state(run.task, weights, {}, where="the imported checkpoint")
        for name, optimizer in optimizers.items():
            _load(optimizer, names, taken[name])
            _warn_of_differences(optimizer, names, state["optimizers"])
    run.progress.load_json(snapshot.progress)
    fresh = sorted(name for name, updater in engine.updaters.items() if updater.state_dict())
    if fresh:
        _LOG.warning(
            f"an imported checkpoint has no state of schedules: that of {', '.join(fresh)} starts anew"
        )


def _check_names(task: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise if all names have another prefix, with the renaming that fixes it."""
    own = list(task.state_dict())
    suggestion = prefix_hint(weights, own)
    if suggestion:
        raise CheckpointError(
            f"the names in the imported checkpoint are not those of {type(task).__name__}, such as"
            f" {own[0]!r}. {suggestion}Import it again with this"
        )


def _own_slots(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], slots: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the slots of an optimizer's parameters."""
    kind = type(optimizer).__name__
    if kind not in _ADAM:
        raise CheckpointError(
            f"the imported checkpoint has the state of Adam, and this run's optimizer is {kind}. Use Adam or"
            " AdamW, or start from its weights: task.load_weights(path)"
        )
    mine = [names[each] for group in optimizer.param_groups for each in group["params"]]
    own = {key: value for key, value in slots.items() if key.rpartition("/")[0] in set(mine)}
    lacking = sorted(set(mine) - {key.rpartition("/")[0] for key in own})
    if lacking:
        raise CheckpointError(
            f"the imported checkpoint has no optimizer state for {lacking[0]!r}, which this task trains"
            f" ({len(lacking)} such). Train the same parameters, or start from its weights:"
            " task.load_weights(path)"
        )
    return own


def _check_all_taken(slots: Mapping[str, Tensor], taken: Mapping[str, Mapping[str, Tensor]]) -> None:
    left = sorted(set(slots).difference(*taken.values()))
    if left:
        raise CheckpointError(
            f"the imported checkpoint has optimizer state for {left[0].rpartition('/')[0]!r}, which this task"
            " does not train. Train the same parameters, or start from its weights: task.load_weights(path)"
        )


def _load(optimizer: Optimizer, names: Mapping[nn.Parameter, str], slots: Mapping[str, Tensor]) -> None:
    """Load the moments; leave groups and settings unchanged."""
    own = state_by_name(optimizer, names)[1]
    texts = {key: described(value) for key, value in slots.items()}
    load_state_by_name(optimizer, names, slots, {**own, "scalars": {}, "slots": texts})


def _warn_of_differences(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], stored: Mapping[str, Any]
) -> None:
    """Warn if a setting differs that changes the updates computed from the imported moments."""
    groups = [group for each in stored.values() for group in each["groups"]]
    there = {name: group for group in groups for name in group["parameters"]}
    for group in optimizer.param_groups:
        for name in (names[each] for each in group["params"]):
            before = there.get(name, {})
            for key in _COMPARED:
                old, new = before.get(key), _comparable(group.get(key))
                if old is not None and new is not None and old != new:
                    _LOG.warning(
                        f"the imported optimizer had {key}={old} for {name!r}, this task has"
                        f" {key}={new}. The task's value applies"
                    )
                    return


def _comparable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
