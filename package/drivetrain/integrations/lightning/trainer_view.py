"""The objects `self.trainer` and `self.logger` of a module: a small part of Lightning's, out of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from drivetrain.core.errors import nearest
from drivetrain.distributed.processes import local_rank, rank, world_size
from drivetrain.integrations.lightning.state import ModuleState


class TrainerView:
    """`self.trainer` of a module in a run: the values that modules read.

    Args:
        state: The module in its run.
    """

    barebones = False
    progress_bar_callback = None
    fast_dev_run = False

    def __init__(self, state: ModuleState) -> None:
        self._state = state

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"self.trainer has no {name!r} here: it is a part of Lightning's Trainer."
                f" {nearest(name, NAMES)}"
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

    # Its length.

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs, or None."""
        epochs = self._state.totals.max_epochs
        return None if epochs is None else int(epochs) if epochs == int(epochs) else self._state.totals.epochs

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 for none."""
        limit = self._state.totals.max_steps
        return -1 if limit is None else limit

    @property
    def estimated_stepping_batches(self) -> int | float:
        """The number of steps of the fit; infinite if it is unknown."""
        steps = self._state.totals.steps
        return float("inf") if steps is None else steps

    @property
    def num_training_batches(self) -> int | float:
        """The number of batches in an epoch; infinite if it is unknown."""
        run = self._state.run
        found = None if run is None or run.train_feed is None else run.train_feed.batches_per_epoch
        if found is None and (steps := self._state.totals.steps_per_epoch) is not None:
            found = steps * self.accumulate_grad_batches
        return float("inf") if found is None else found

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
            feed, progress = run.train_feed, run.progress
            if feed.plan is None:
                return feed.accumulation
            stages, steps = feed.plan.batches, progress.steps + progress.skipped
            done = {"steps": steps, "epochs": progress.epoch, "samples": progress.samples}
            return stages.at(done[stages.unit])
        return self._state.totals.gradient_accumulation_steps or 1

    # Processes.

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return world_size()

    num_devices = world_size

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

    logged_metrics = callback_metrics

    @property
    def log_dir(self) -> str | None:
        """The run's directory, or None."""
        run = self._state.run
        return None if run is None or run.run_dir is None else str(run.run_dir)

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
            return [LoggerView(None, run)] if self._state.has_loggers else []
        return [LoggerView(each, run) for each in run.loggers]


NAMES = sorted({name for name in vars(TrainerView) if not name.startswith("_")})
"""What `self.trainer` has."""


class LoggerView:
    """`self.logger` of a module.

    Args:
        logger: The logger; None on a process that does not log, where calls do nothing.
        run: The run.
    """

    def __init__(self, logger: Any, run: Any) -> None:
        self._logger = logger
        self._run = run

    @property
    def experiment(self) -> Any:
        """The object of the logger's own tool, such as a run of wandb."""
        if self._logger is None:
            return Silent()
        found = getattr(self._logger, "experiment", None)
        if found is None:
            raise AttributeError(
                f"self.logger.experiment: {type(self._logger).__name__} has no attribute 'experiment'. Log"
                " numbers by self.log; to draw with another tool, give the Trainer a logger of your own with"
                " an attribute `experiment`, beside log_metrics, log_config and close"
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
            raise AttributeError(
                f"self.logger has no {name!r}: {type(self._logger).__name__} does not offer it. There are"
                " experiment, log_metrics, log_hyperparams, log_dir, save_dir, and what the logger itself has"
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
