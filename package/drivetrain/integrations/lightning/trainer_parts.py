"""Parts of Lightning's Trainer that modules and callbacks read: the strategy, the state, the loops."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.distributed.processes import local_rank, rank, world_size
from drivetrain.integrations.lightning.kinds import is_theirs
from drivetrain.integrations.lightning.state import ModuleState

_STRATEGIES = {
    "single": "SingleDeviceStrategy",
    "ddp": "DDPStrategy",
    "fsdp": "FSDPStrategy",
    "deepspeed": "DeepSpeedStrategy",
    "xla": "XLAStrategy",
    "xla_fsdp": "XLAFSDPStrategy",
}
"""The names of Lightning's classes, by the names of our strategies."""

_ACCELERATORS = {
    "cpu": "CPUAccelerator",
    "cuda": "CUDAAccelerator",
    "mps": "MPSAccelerator",
    "xla": "XLAAccelerator",
}
"""The names of Lightning's classes, by the types of devices."""

_STAGES = {"train": "train", "validation": "validate", "test": "test", "predict": "predict"}


class TrainerPart:
    """A part of the Trainer.

    Args:
        state: The module in its run.
        path: Its name in messages, such as "self.trainer.strategy".
    """

    def __init__(self, state: ModuleState, path: str) -> None:
        self._state = state
        self._path = path

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            names = sorted(each for each in {*dir(type(self)), *vars(self)} if not each.startswith("_"))
            hint = nearest(name, names)
            if name.startswith("_"):
                hint = "It is private to Lightning's loop; what needs it is trained by Lightning's Trainer"
            raise unknown(self._state, f"{self._path} has no {name!r} here. {hint}")


def unknown(state: ModuleState, text: str) -> AttributeError:
    """Return the error of a name that is missing, and note it for a property that hides it."""
    state.unknown = AttributeError(text)
    frame = inspect.currentframe()
    state.read_by = set()
    while frame is not None:
        state.read_by.add(frame.f_code)
        frame = frame.f_back
    return state.unknown


class ProcessPart:
    """The rank of this process, which the Trainer and its strategy both tell."""

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return world_size()

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        return rank()

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine."""
        return local_rank()

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process."""
        return rank() == 0


class StrategyPart(ProcessPart, TrainerPart):
    """`trainer.strategy`; the name of its class is that of Lightning's strategy of this kind."""

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        run = self._state.run
        return self._state.device if run is None else run.engine.device

    @property
    def model(self) -> Any:
        """The module."""
        return self._state.module

    lightning_module = model

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return [*self._state.optimizers]

    @property
    def accelerator(self) -> Any:
        """The kind of device, as an object of Lightning's own class."""
        return accelerator_of(self._state, self._path)

    @property
    def _lightning_optimizers(self) -> list[Any]:
        return self._state.optimizer_views()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._ranks(lambda ranks: ranks.all_gather(None))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one process."""
        return self._gathered(obj)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a number over all processes."""
        how = str(getattr(reduce_op, "name", reduce_op)).lower()
        if how not in ("mean", "avg", "sum") or group is not None:
            raise ConfigError(
                f"strategy.reduce(reduce_op={reduce_op!r}). Allowed: 'mean', 'sum', of all ranks"
            )
        if not isinstance(tensor, Tensor):
            tensor = torch.tensor(tensor, device=self.root_device)
        found = torch.stack([each.to(tensor.device) for each in self._gathered(tensor.detach())])
        return found.sum(0) if how == "sum" else found.mean(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes decide so, or any."""
        found = self._gathered(bool(decision))
        return sum(found) == len(found) if all else any(found)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, stacked."""
        found: Tensor = self._state.all_gather(tensor, group, sync_grads)
        return found

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Run backward in manual optimization."""
        self._state.manual_backward(loss, *args, **options)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = self._ranks(lambda ranks: ranks.all_gather(value) if ranks.size > 1 else [value])
        return found

    def _ranks(self, ask: Callable[[Any], Any]) -> Any:
        run = self._state.run
        if run is None and world_size() > 1:
            raise ConfigError(
                f"{self._path} asks other processes before the run has begun: do it in on_fit_start"
            )
        return ask(_Alone() if run is None else run.engine.ranks)


class _Alone:
    size = 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]


def strategy_of(state: ModuleState) -> StrategyPart:
    """Return `trainer.strategy`."""
    name = "single" if state.run is None else state.run.engine.strategy.name
    kind = type(_STRATEGIES.get(name, name), (StrategyPart,), {})
    found: StrategyPart = kind(state, "self.trainer.strategy")
    return found


class ClippingPart(TrainerPart):
    """`trainer.precision_plugin`, which Lightning's `clip_gradients` calls."""

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, algorithm: Any = "norm") -> None:
        """Clip the gradients of an optimizer's parameters."""
        self._state.clip_gradients(optimizer, clip_val, algorithm)


def _theirs(state: ModuleState, name: str) -> Any:
    """Return a module of the package of Lightning that the class of the user's module has imported."""
    base = next(
        each.__module__
        for each in type(state.module).__mro__
        if each.__name__ == "LightningModule" and is_theirs(each)
    )
    return sys.modules[f"{base.partition('.core')[0]}.{name}"]


def accelerator_of(state: ModuleState, path: str) -> Any:
    """Return `trainer.accelerator`, an object of Lightning's own class for the device of this process."""
    kind = strategy_of(state).root_device.type
    if kind not in _ACCELERATORS:
        raise unknown(state, f"{path}: Lightning has no accelerator for the device {kind!r}")
    return getattr(_theirs(state, "accelerators"), _ACCELERATORS[kind])()


def trainer_state(state: ModuleState) -> Any:
    """Return `trainer.state`, an object of Lightning's own class."""
    states = _theirs(state, "trainer.states")
    run = state.run
    check = run is not None and run.evaluation.is_sanity_check and state.stage == "validation"
    stage = "sanity_check" if check else _STAGES[state.stage]
    return states.TrainerState(
        status=states.TrainerStatus.RUNNING, fn=states.TrainerFn(state.verb), stage=states.RunningStage(stage)
    )


class FitLoop(TrainerPart):
    """`trainer.fit_loop`: where the fit is."""

    restarting = False

    @property
    def min_epochs(self) -> int:
        """The least number of epochs; 0 for none."""
        return int(self._state.view.min_epochs)

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs, or None."""
        found: int | None = self._state.view.max_epochs
        return found

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 for none."""
        return int(self._state.view.max_steps)

    @property
    def max_batches(self) -> int | float:
        """The number of batches in an epoch."""
        found: int | float = self._state.view.num_training_batches
        return found

    @property
    def epoch_progress(self) -> TrainerPart:
        """`current`, with the number of the epoch."""
        part = TrainerPart(self._state, "self.trainer.fit_loop.epoch_progress")
        current = TrainerPart(self._state, "self.trainer.fit_loop.epoch_progress.current")
        epoch = self._state.epoch
        vars(current).update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
        vars(part)["current"] = current
        return part

    @property
    def epoch_loop(self) -> TrainerPart:
        """`batch_idx`, `total_batch_idx`, `global_step`, and whether the batch is the last."""
        part, run = TrainerPart(self._state, "self.trainer.fit_loop.epoch_loop"), self._state.run
        vars(part).update(
            batch_idx=self._state.next_index - 1,
            total_batch_idx=0 if run is None else run.progress.micro_batches,
            global_step=self._state.steps,
            _batches_that_stepped=self._state.steps,
        )
        vars(part)["val_loop"] = ValidationLoop(self._state, "self.trainer.fit_loop.epoch_loop.val_loop")
        return part

    def setup_data(self) -> None:
        """Do nothing: the data is set up before the run begins."""


class ValidationLoop(TrainerPart):
    """`trainer.fit_loop.epoch_loop.val_loop`: whether the fit validates."""

    @property
    def _data_source(self) -> ValidationLoop:
        return self

    def is_defined(self) -> bool:
        """Return whether the fit has validation data."""
        run = self._state.run
        return run is not None and bool(run.evaluation_feeds)


class ResultsPart:
    """`trainer._results` for a `log` of the module's own, which calls `super().log`."""

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    def log(self, fx: str, name: str, value: Any, *, sync_dist_fn: Any = None, **options: Any) -> None:
        """Log a value; see `LightningModule.log`."""
        self._state.logs.log(name, value, **options)

    def reset(self, **_: Any) -> None:
        """Do nothing: the logs begin anew by themselves."""


class ConnectorPart:
    """`trainer._logger_connector` and `_accelerator_connector`, as far as `LightningModule.log` asks."""

    is_distributed = False
    _current_fx = None

    def should_reset_tensors(self, fx: str) -> bool:
        """Return that the logs begin anew by themselves."""
        return False


class Profiler:
    """`trainer.profiler`: its blocks are run, and not measured."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Run the block."""
        yield action_name

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""


class CheckpointPart(TrainerPart):
    """`trainer.checkpoint_callback`: where the run's checkpoints are."""

    def __init__(self, state: ModuleState, saver: Any) -> None:
        super().__init__(state, "self.trainer.checkpoint_callback")
        self._saver = saver

    @property
    def monitor(self) -> str | None:
        """The name of the value that ranks checkpoints, or None."""
        found: str | None = next((each.by for each in self._saver.policies if each.by is not None), None)
        return found

    @property
    def dirpath(self) -> str:
        """The directory of the checkpoints."""
        return str(self._saver.manager.directory)

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint; "" before there is one."""
        return next(iter(self._saver.best_checkpoints().values()), "")

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint; "" before there is one."""
        run = self._state.run
        return "" if run is None else str(run.last_checkpoint or "")


def loader_of(feed: Any) -> Any:
    """Return the data of a feed as it was given: the loader, or a list of batches."""
    source = vars(feed.source)  # which has no other use for it
    return next((source[name] for name in ("_loader", "_data", "_batches") if name in source), feed.source)


def limit_of(feed: Any) -> int | float:
    """Return the number of batches that an epoch of a feed may have; 1.0 for all."""
    limit: int | None = feed.limit
    return 1.0 if limit is None else limit
