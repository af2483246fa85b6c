"""The objects `self.trainer` and `self.logger` of a module: a small part of Lightning's, out of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from drivetrain.callbacks import EarlyStopping
from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.core.errors import nearest
from drivetrain.core.intervals import Every
from drivetrain.integrations.lightning.kinds import is_kind
from drivetrain.integrations.lightning.least_epochs import LeastEpochs
from drivetrain.integrations.lightning.state import ModuleState
from drivetrain.integrations.lightning.trainer_parts import (
    CheckpointPart,
    ClippingPart,
    ConnectorPart,
    FitLoop,
    ProcessPart,
    Profiler,
    ResultsPart,
    StrategyPart,
    TrainerPart,
    accelerator_of,
    limit_of,
    loader_of,
    strategy_of,
    trainer_state,
    unknown,
)


class TrainerView(ProcessPart):
    """`self.trainer` of a module in a run: the values that modules read.

    Args:
        state: The module in its run.
    """

    barebones = False
    progress_bar_callback = None
    fast_dev_run = False
    received_sigterm = False
    interrupted = False
    num_nodes = 1
    node_rank = 0
    overfit_batches = 0.0
    ckpt_path = None
    prediction_writer_callbacks: Sequence[Any] = ()

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise unknown(
                self._state,
                f"self.trainer has no {name!r} here: it is a part of Lightning's Trainer."
                f" {nearest(name, NAMES)}",
            )

    # Where the run is.

    @property
    def global_step(self) -> int:
        """The steps of optimizers so far."""
        return self._state.steps

    @property
    def current_epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._state.epoch

    @property
    def is_last_batch(self) -> bool:
        """Whether the step is the last one of its epoch."""
        run = self._state.run
        return run is not None and run.window is not None and bool(run.window.last)

    @property
    def should_stop(self) -> bool:
        """Whether the run was asked to stop; setting it to True stops it after this step."""
        run = self._state.run
        return run is not None and run.stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self._state.run is not None:
            self._state.run.stop("trainer.should_stop was set")

    @property
    def training(self) -> bool:
        """Whether a fit trains, and does not evaluate."""
        return self._state.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation data is evaluated."""
        return self._state.stage == "validation"

    @property
    def testing(self) -> bool:
        """Whether test data is evaluated."""
        return self._state.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is made."""
        return self._state.stage == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether data is evaluated."""
        return self._state.stage in ("validation", "test")

    @property
    def sanity_checking(self) -> bool:
        """Whether this is the short validation before training."""
        run = self._state.run
        return run is not None and run.evaluation.is_sanity_check

    @property
    def state(self) -> Any:
        """The verb and the stage, as an object of Lightning's own class."""
        return trainer_state(self._state)

    # Its length.

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs, or None."""
        epochs = self._state.length.max_epochs
        return None if epochs is None else int(epochs) if epochs == int(epochs) else self._state.length.epochs

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 for none."""
        limit = self._state.length.max_steps
        return -1 if limit is None else limit

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of steps of the fit; infinite if it is unknown."""
        steps = self._state.length.steps
        return float("inf") if steps is None else steps

    @property
    def num_training_batches(self) -> int | float:
        """The number of batches in an epoch; infinite if it is unknown."""
        run = self._state.run
        found = None if run is None or run.train_feed is None else run.train_feed.batches_per_epoch
        if found is None and (steps := self._state.length.steps_per_epoch) is not None:
            found = steps * self.accumulate_grad_batches
        return float("inf") if found is None else found

    @property
    def min_epochs(self) -> int:
        """The least number of epochs; 0 for none."""
        found = self._of_run(LeastEpochs)
        return 0 if found is None else found.epochs

    @property
    def log_every_n_steps(self) -> int:
        """The number of steps between two log points; 0 for none."""
        run = self._state.run
        every = None if run is None else run.triggers.log.every
        return int(every.amount) if every is not None and every.unit == "steps" else 0

    @property
    def num_val_batches(self) -> list[int | float]:
        """The number of batches of each evaluation loader."""
        run = self._state.run
        counts = [] if run is None else [feed.batches_per_epoch for _, feed in run.evaluation_feeds]
        return [float("inf") if each is None else each for each in counts]

    @property
    def accumulate_grad_batches(self) -> int:
        """The number of batches in a step."""
        run = self._state.run
        if run is not None and run.train_feed is not None:
            return run.train_feed.calendar.batches_now(run.progress)
        return self._state.length.gradient_accumulation_steps or 1

    @property
    def val_check_interval(self) -> int | float:
        """The steps between two validations, or the part of an epoch: 1.0 for all of it."""
        every = self._validates()
        return float(min(every.amount, 1)) if every.unit != "steps" else int(every.amount)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """The epochs between two validations; None if they are counted in steps alone."""
        every = self._validates()
        return max(1, int(every.amount)) if every.unit == "epochs" else None

    def _validates(self) -> Any:
        run = self._state.run
        return Every("1 epoch") if run is None else run.triggers.validate.every or Every("1 epoch")

    @property
    def enable_validation(self) -> bool:
        """Whether the fit validates."""
        run = self._state.run
        return run is not None and bool(run.evaluation_feeds)

    @property
    def limit_train_batches(self) -> int | float:
        """The number of batches that an epoch may have; 1.0 for all."""
        run = self._state.run
        return 1.0 if run is None or run.train_feed is None else limit_of(run.train_feed)

    @property
    def limit_val_batches(self) -> int | float:
        """The number of batches of each evaluation loader; 1.0 for all."""
        run = self._state.run
        limits = [] if run is None else [limit_of(feed) for _, feed in run.evaluation_feeds]
        return limits[0] if limits else 1.0

    limit_test_batches = limit_predict_batches = limit_val_batches

    # Data.

    @property
    def train_dataloader(self) -> Any:
        """The training data as it was given, or None."""
        run = self._state.run
        return None if run is None or run.train_feed is None else loader_of(run.train_feed)

    @property
    def val_dataloaders(self) -> Any:
        """The data of the evaluation as it was given; a list if there are several loaders, or None."""
        return self._evaluated("validation")

    @property
    def test_dataloaders(self) -> Any:
        """The test data as it was given; a list if there are several loaders, or None."""
        return self._evaluated("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The data of a prediction as it was given, or None."""
        return self._evaluated("predict")

    def _evaluated(self, stage: str) -> Any:
        run = self._state.run
        if run is None or stage != ("validation" if run.train_feed is not None else run.stage):
            return None
        found = [loader_of(feed) for _, feed in run.evaluation_feeds]
        return None if not found else found[0] if len(found) == 1 else found

    # Processes.

    @property
    def strategy(self) -> StrategyPart:
        """The strategy: its device, and what asks other processes."""
        return strategy_of(self._state)

    @property
    def accelerator(self) -> Any:
        """The kind of device, as an object of Lightning's own class."""
        return accelerator_of(self._state, "self.trainer")

    @property
    def precision(self) -> str:
        """The name of the precision."""
        run = self._state.run
        name = "32" if run is None else run.engine.precision.name
        return f"{name}-true" if name.isdigit() else name

    @property
    def precision_plugin(self) -> ClippingPart:
        """The part that `clip_gradients` of a module calls."""
        return ClippingPart(self._state, "self.trainer.precision_plugin")

    num_devices = ProcessPart.world_size

    @property
    def device_ids(self) -> list[int]:
        """The numbers of the processes' devices."""
        return [*range(self.num_devices)]

    def print(self, *args: Any, **options: Any) -> None:
        """Print on the first process."""
        if self.is_global_zero:
            print(*args, **options)

    # Parts of the run.

    @property
    def lightning_module(self) -> Any:
        """The module."""
        return self._state.module

    model = lightning_module

    @property
    def datamodule(self) -> Any:
        """The data module that `as_data` was given, or None."""
        return self._state.task.datamodule

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of Lightning whose hooks are called, and those of the run."""
        run = self._state.run
        return [*self._state.callbacks, *(() if run is None else run.callbacks)]

    @property
    def checkpoint_callback(self) -> CheckpointPart | None:
        """Where the checkpoints are, or None."""
        found = self._of_run(CheckpointSaver)
        return None if found is None else CheckpointPart(self._state, found)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """`checkpoint_callback` in a list, if there is one."""
        found = self.checkpoint_callback
        return [] if found is None else [found]

    @property
    def early_stopping_callback(self) -> Any:
        """The callback that stops early, or None."""
        found = (each for each in self._state.callbacks if is_kind(each, "EarlyStopping"))
        return next(found, self._of_run(EarlyStopping))

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """`early_stopping_callback` in a list, if there is one."""
        found = self.early_stopping_callback
        return [] if found is None else [found]

    def _of_run(self, kind: type) -> Any:
        run = self._state.run
        return None if run is None else next((each for each in run.callbacks if isinstance(each, kind)), None)

    @property
    def fit_loop(self) -> FitLoop:
        """Where the fit is."""
        return FitLoop(self._state, "self.trainer.fit_loop")

    @property
    def _evaluation_loop(self) -> TrainerPart:
        # Libraries set `_print_results` of it to False; no table of results is printed here.
        return TrainerPart(self._state, "self.trainer._evaluation_loop")

    @property
    def profiler(self) -> Profiler:
        """A profiler that measures nothing."""
        return Profiler()

    # Asked by LightningModule.log, if the module overrides it and calls super().log.

    @property
    def _results(self) -> ResultsPart | None:
        return None if self._state.logs.hook == "" else ResultsPart(self._state)

    _logger_connector = _accelerator_connector = ConnectorPart()

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return [*self._state.optimizers]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedules, with when each is stepped."""
        return [*self._state.schedules]

    @property
    def gradient_clip_val(self) -> float | None:
        """The limit of the gradient that the Trainer was given, or None."""
        return self._state.clipping[0]

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """The way of clipping, "norm" or "value", or None."""
        return self._state.clipping[1]

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        """The latest value of each logged name."""
        return {name: torch.tensor(value) for name, value in self._state.values().items()}

    logged_metrics = progress_bar_metrics = callback_metrics

    @property
    def log_dir(self) -> str | None:
        """The run's directory, or None."""
        run = self._state.run
        return None if run is None or run.run_dir is None else str(run.run_dir)

    @property
    def default_root_dir(self) -> str:
        """The run's directory, or the working directory."""
        return self.log_dir or os.getcwd()

    @property
    def logger(self) -> Any:
        """The run's first logger, or None."""
        found = self.loggers
        return found[0] if found else None

    @property
    def loggers(self) -> list[Any]:
        """The run's loggers."""
        run = self._state.run
        if run is None or run.stage == "predict":
            return []
        if not run.is_main:
            return [LoggerView(None, self._state)] if self._state.has_loggers else []
        return [LoggerView(each, self._state) for each in run.loggers]


NAMES = sorted({name for name in vars(TrainerView) if not name.startswith("_")})
"""What `self.trainer` has."""


class LoggerView:
    """`self.logger` of a module.

    Args:
        logger: The logger; None on a process that does not log, where calls do nothing.
        state: The module in its run.
    """

    def __init__(self, logger: Any, state: ModuleState) -> None:
        self._logger = logger
        self._state = state
        assert state.run is not None
        self._run = state.run

    @property
    def experiment(self) -> Any:
        """The object of the logger's own tool, such as a run of wandb."""
        if self._logger is None:
            return Silent()
        found = getattr(self._logger, "experiment", None)
        if found is None:
            raise unknown(
                self._state,
                f"self.logger.experiment: {type(self._logger).__name__} has no attribute 'experiment'. Log"
                " numbers by self.log; to draw with another tool, give the Trainer a logger of your own with"
                " an attribute `experiment`, beside log_metrics, log_config and close",
            )
        return found

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers now, at a step."""
        if self._logger is not None:
            at = self._run.progress.steps if step is None else step
            self._logger.log_metrics({name: float(value) for name, value in metrics.items()}, at)

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """Log a configuration."""
        if self._logger is not None:
            values = dict(params) if isinstance(params, Mapping) else vars(params)
            self._logger.log_config({"hyper_parameters": values})

    @property
    def log_dir(self) -> str | None:
        """The run's directory."""
        directory = self._run.run_dir
        return None if directory is None else str(directory)

    save_dir = log_dir

    def __getattr__(self, name: str) -> Any:
        if self._logger is None:
            return Silent()
        if name.startswith("__") or not hasattr(self._logger, name):
            raise unknown(
                self._state,
                f"self.logger has no {name!r}: {type(self._logger).__name__} does not offer it. There are"
                " experiment, log_metrics, log_hyperparams, log_dir, save_dir, and what the logger has",
            )
        return getattr(self._logger, name)


class Silent:
    """Takes every call and does nothing, on a process that does not log."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        """Return this object."""
        return self
