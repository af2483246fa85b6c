"""A module in a run: what its hooks, its `self.trainer` and its manual optimization share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from drivetrain.core.totals import Totals
from drivetrain.integrations.lightning.kinds import is_overridden
from drivetrain.integrations.lightning.logs import Logs
from drivetrain.integrations.lightning.optimizers import ScheduleConfig
from drivetrain.run.run import Run

_NOT_LOGGING = frozenset(
    (
        *("on_fit_start", "on_train_end", "on_fit_end", "on_validation_end", "on_test_end", "predict_step"),
        *(f"on_predict_{each}" for each in ("start", "epoch_start", "batch_start", "batch_end")),
        *("on_predict_epoch_end", "on_predict_end"),
    )
)
"""The methods that have no log point after them."""


class ModuleState:
    """A module in a run.

    Args:
        task: The task.
        module: Its module.
        stage: The stage of the run.

    Attributes:
        run: The run, once it has begun.
        stage: What goes on: training, or an evaluation in it.
        optimizers: The module's optimizers.
        schedules: Its schedules.
        optimizer_steps: The steps that a module has made that steps its optimizers itself.
        clipping: The limit of the gradient and its kind, of the Trainer.
        has_loggers: Whether the run logs.
        training_logs: What is logged in training.
        logs: What is logged now, in training or in an evaluation.
        ended: 1 while hooks of an epoch run that is counted already.
    """

    def __init__(self, task: Any, module: Any, stage: str) -> None:
        self.task = task
        self.module = module
        self.stage = stage
        self.run: Run | None = None
        self.optimizers: list[Optimizer] = []
        self.schedules: list[ScheduleConfig] = []
        self.optimizer_steps = 0
        self.clipping: tuple[float | None, str | None] = (None, None)
        self.has_loggers = False
        self.is_manual = not module.automatic_optimization
        self.training_logs = Logs(module)
        self.training_logs.steps_by_default = True
        self.logs = self.training_logs
        self.ended = 0
        self._hooks: dict[str, Callable[..., Any] | None] = {}

    def hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook of the module; None if the module does not override it."""
        if name not in self._hooks:
            overridden = is_overridden(self.module, name)
            self._hooks[name] = getattr(self.module, name) if overridden else None
        return self._hooks[name]

    @property
    def totals(self) -> Totals:
        """The planned length of the fit."""
        found: Totals = self.task.totals if self.run is None else self.run.totals
        return found

    @property
    def steps(self) -> int:
        """The steps of optimizers so far."""
        if self.is_manual or self.run is None:
            return self.optimizer_steps
        return self.run.progress.steps

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; during its last hooks too."""
        if self.run is None:
            return 0
        return self.run.progress.epoch - self.ended

    def values(self) -> dict[str, float]:
        """Return the latest value of each logged name."""
        found = {} if self.run is None else dict(self.run.metrics)
        for each in self.training_logs.entries.values():
            if each.latest is not None:
                found[each.full_name(of_step=True)] = float(each.latest)
        return found

    @contextmanager
    def inside(self, name: str, batch: Any = None, is_batch: bool = False) -> Iterator[None]:
        """Run the block, a method of the module, which logs under its name if Lightning lets it log."""
        logs = self.logs
        if name in _NOT_LOGGING:
            name = ""
        before = logs.hook, logs.batch, logs.is_batch, logs.steps_by_default
        logs.hook, logs.batch, logs.is_batch = name, batch, is_batch
        logs.steps_by_default = is_batch and logs is self.training_logs
        try:
            yield
        finally:
            logs.hook, logs.batch, logs.is_batch, logs.steps_by_default = before

    def call(self, name: str, *args: Any, batch: Any = None, is_batch: bool = False) -> None:
        """Call a hook of the module, if the module has it."""
        hook = self.hook(name)
        if hook is not None:
            with self.inside(name, batch, is_batch):
                hook(*args)
