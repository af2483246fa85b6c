"""Optimizer states by parameter name, and the checkpoints of the user's own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tree import pack, unpack, well_formed
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.saving.sharding import Like, is_sharded
from drivetrain.checkpoint.weights.module_state import load_module_state, module_state, parameter_names
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.files import check_path
from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import Streams
from drivetrain.core.types import Stateful
from drivetrain.distributed.tensors import broadcast_buffers
from drivetrain.strategies import Strategy
from drivetrain.task.optim.state import load_state_by_name, state_by_name
from drivetrain.task.task import StepModule


def optimizer_state(
    module: nn.Module, optimizers: Mapping[str, Optimizer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the states of a module's optimizers: tensors by `parameter/slot`, and the rest by optimizer."""
    names = parameter_names(module)
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}
    owners: dict[Any, str] = {}
    for name, optimizer in optimizers.items():
        for each in (each for group in optimizer.param_groups for each in group["params"]):
            if (other := owners.setdefault(each, name)) != name:
                raise CheckpointError(
                    f"the optimizers {other!r} and {name!r} both have {names.get(each)!r}, and a checkpoint"
                    " has one state for a parameter: give each parameter to one optimizer"
                )
        own, meta[name] = state_by_name(optimizer, names)
        tensors.update(own)
    return tensors, meta


def restore_optimizer_state(
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Restore what `optimizer_state` returned."""
    if set(meta) != set(optimizers):
        raise CheckpointError(f"the checkpoint has optimizers {sorted(meta)}, the task {sorted(optimizers)}")
    names = parameter_names(module)
    for name, optimizer in optimizers.items():
        mine = {each for group in meta[name]["groups"] for each in group["parameters"]}
        own = {key: value for key, value in tensors.items() if key.rpartition("/")[0] in mine}
        load_state_by_name(optimizer, names, own, meta[name])


def like_module(module: nn.Module) -> Like | None:
    """Return how to shard the loaded state of a module and its optimizers: like its parameters.

    Return None if nothing is sharded.
    """
    weights = module_state(module)[0]
    if not any(is_sharded(each) for each in weights.values()):
        return None

    def like(group: str, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if group == "optimizer":
            parameter = weights.get(name.rpartition("/")[0])
            return parameter if parameter is not None and tuple(parameter.shape) == shape else None
        return weights.get(name) if group == "model" else None

    return like


def _as_one_module(model: Any) -> nn.Module:
    # Several modules are saved as one, each under its name.
    modules = model if isinstance(model, Mapping) else None
    if modules is not None:
        return nn.ModuleDict({name: _plain(each) for name, each in modules.items()})
    return _plain(model)


def _plain(model: Any) -> nn.Module:
    if isinstance(getattr(model, "module", None), StepModule):  # wrapped by DDP or by DeepSpeed
        model = model.module
    if isinstance(model, StepModule):
        return model.task
    if isinstance(model, nn.Module):
        return model
    raise ConfigError(f"model is a module or a mapping of names to modules, not a {type(model).__name__}")


def _by_name(optimizer: Any) -> dict[str, Optimizer]:
    if optimizer is None:
        return {}
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {"default": optimizer}
    for each in named.values():
        if not isinstance(each, Optimizer):
            raise ConfigError(
                f"optimizer must be an optimizer or a mapping of names to them, not a {type(each).__name__}"
            )
    return named


def save_own_loop(
    strategy: Strategy, progress: Progress, path: str, model: Any, optimizer: Any, state: Mapping[str, Any]
) -> None:
    """See `Engine.save`."""
    check_path(path)
    weights: dict[str, Tensor] = {}
    optimizers: dict[str, Tensor] = {}
    tree: dict[str, Any] = {"strategy": strategy.state_dict(), "module_extras": {}, "optimizers": {}}
    if model is not None:
        module = _as_one_module(model)
        broadcast_buffers(module, strategy.world_size)
        with strategy.checkpoint_layout(_by_name(optimizer)) as taken:
            weights, tree["module_extras"] = module_state(module)
            if optimizer is not None:
                optimizers, tree["optimizers"] = optimizer_state(module, taken)
    elif optimizer is not None:
        raise ConfigError("an optimizer is saved by its parameters' names: give the model too")
    tree["user"] = {
        name: each.state_dict() if isinstance(each, Stateful) else each for name, each in state.items()
    }
    packed, tensors = pack(tree)
    snapshot = Snapshot(
        tensors={"model": weights, "optimizer": optimizers, "state": tensors},
        objects={"state": packed},
        progress=dict(progress.to_json()),
    )
    DirectoryCheckpointIO(ranks=strategy.ranks).save(str(path), snapshot)


def load_own_loop(
    strategy: Strategy,
    progress: Progress,
    streams: Streams,
    path: str,
    model: Any,
    optimizer: Any,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """See `Engine.load`."""
    module = None if model is None else _as_one_module(model)
    with strategy.checkpoint_layout(_by_name(optimizer)):
        like = None if module is None else like_module(module)
    snapshot = DirectoryCheckpointIO().load(str(path), like=like)
    with well_formed(f"the state in {path}"):
        tree = unpack(snapshot.objects.get("state"), snapshot.tensors.get("state", {}))
        found = _take_over(strategy, path, snapshot, tree, module, optimizer, state)
        progress.load_json(snapshot.progress)
        streams.seed_step(progress.steps)
        return found


def _take_over(
    strategy: Strategy,
    path: str,
    snapshot: Snapshot,
    tree: Any,
    module: nn.Module | None,
    optimizer: Any,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    if not isinstance(tree, dict) or "user" not in tree:
        raise CheckpointError(f"{path} was not saved by Engine.save; fit(resume=...) resumes a Trainer's")
    if module is not None:
        with strategy.checkpoint_layout(_by_name(optimizer), write=True) as taken:
            weights, extras = snapshot.tensors["model"], tree["module_extras"]
            load_module_state(module, weights, extras, where=str(path))
            if optimizer is not None:
                restore_optimizer_state(module, taken, snapshot.tensors["optimizer"], tree["optimizers"])
    strategy.load_state_dict(tree["strategy"])
    stored = tree["user"]
    lacking = sorted(set(state) - set(stored))
    if lacking:
        raise CheckpointError(f"{path} has no {', '.join(map(repr, lacking))}; it has {sorted(stored)}")
    for name, each in state.items():
        if isinstance(each, Stateful):
            each.load_state_dict(stored[name])
    return {name: value for name, value in stored.items() if not isinstance(state.get(name), Stateful)}
