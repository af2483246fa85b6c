"""A scheduler of torch, and when it is stepped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from drivetrain.core.direction import MODES
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.intervals import Every, steps_or_epochs
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, flag, one_of

_LOG = logger(__name__)

_VALIDATIONS = "validations"


@final
@by_name
@dataclass(frozen=True)
class TorchSchedule:
    """A scheduler of torch whose `step()` is called after steps, epochs, or validations with a metric.

    ::

        def configure_optimizers(self):
            return self.make_optimizer


        def make_optimizer(self, parameters):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            return optimizer, TorchSchedule(StepLR(optimizer, step_size=30), every="1 epoch")

    Its state is in the checkpoints.

    Attributes:
        scheduler: An `LRScheduler`, or another object with `step`, `state_dict` and `load_state_dict`; or a
            function of the optimizer that makes one, such as ``functools.partial(StepLR, step_size=30)``.
        every: How often `step()` is called, in steps or epochs, such as "1 epoch". With None it is called
            after each step, or with a metric after each validation.
        metric: The full name of the value that is passed to its `step`, such as "validation/loss". After a
            validation it is a value of that validation; after steps or epochs, the latest value under its
            name.
        required: Whether it is an error if the value was not logged; otherwise that call is left out.
        mode: Whether less ("min") or more ("max") of the value is better, for a `ReduceLROnPlateau`, whose
            own mode must be the same. "auto" checks its mode, which torch sets to "min", against the metric's
            `higher_is_better` or its well-known name.

    Raises:
        ConfigError: An interval of another unit, a metric that is no name, a ReduceLROnPlateau without a
            metric or of another mode, or a metric for a scheduler that takes none.
    """

    scheduler: Any
    every: str | int | Every | None = None
    metric: str | None = None
    required: bool = True
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.every is not None:
            every = steps_or_epochs("TorchSchedule(every=)", self.every)
            object.__setattr__(self, "every", every)  # the class is frozen
        if self.metric is not None and not (isinstance(self.metric, str) and self.metric):
            raise ConfigError(f"TorchSchedule(metric={self.metric!r}) takes a name such as 'validation/loss'")
        flag("TorchSchedule(required=)", self.required)
        one_of("TorchSchedule(mode=)", self.mode, MODES)
        kind = self.scheduler if isinstance(self.scheduler, type) else type(self.scheduler)
        kind = getattr(self.scheduler, "func", kind)  # of a functools.partial
        is_plateau = isinstance(kind, type) and issubclass(kind, ReduceLROnPlateau)
        if is_plateau and self.metric is None:
            raise ConfigError(
                "a ReduceLROnPlateau needs the name of the value that it monitors:"
                " TorchSchedule(scheduler, metric='validation/loss')"
            )
        of_torch = isinstance(kind, type) and kind.__module__ == LRScheduler.__module__
        if self.metric is not None and of_torch and not is_plateau:
            raise ConfigError(
                f"TorchSchedule(metric={self.metric!r}) is for schedulers whose step takes a value, and"
                f" {kind.__name__}.step takes none. Leave the metric out"
            )

    @property
    def unit(self) -> str:
        """The unit of its steps: "steps", "epochs" or "validations"."""
        if self.every is None:
            return "steps" if self.metric is None else _VALIDATIONS
        assert isinstance(self.every, Every)
        return self.every.unit

    def made(self, optimizer: Optimizer) -> TorchSchedule:
        """Return this schedule; if `scheduler` is a function of the optimizer, it is called first.

        Raises:
            ConfigError: There is no scheduler, it has another optimizer, or its state cannot be kept.
        """
        found = self.scheduler
        if not callable(getattr(found, "step", None)) or isinstance(found, type):
            found = found(optimizer) if callable(found) else found
        what = type(found).__name__
        if not callable(getattr(found, "step", None)):
            raise ConfigError(
                f"TorchSchedule takes a scheduler of torch.optim.lr_scheduler, or a function of the optimizer"
                f" that makes one; it was given a {what}"
            )
        check_stateful(found)
        if getattr(found, "optimizer", optimizer) is not optimizer:
            raise ConfigError(f"the schedule {what} was made for another optimizer than the one returned")
        if isinstance(found, ReduceLROnPlateau) and self.mode not in ("auto", found.mode):
            raise ConfigError(
                f"TorchSchedule(mode={self.mode!r}) with a ReduceLROnPlateau(mode={found.mode!r}): give both"
                " the same mode"
            )
        return replace(self, scheduler=found)

    def warn_if_never(self, steps: int | None, epochs: int | None) -> None:
        """Warn if the run ends before the first step.

        Args:
            steps: The run's steps; None if unknown.
            epochs: Its epochs, the last of them begun; None if unknown.
        """
        length = {"steps": steps, "epochs": epochs}.get(self.unit)
        if isinstance(self.every, Every) and length is not None and self.every.amount > length:
            _LOG.warning(
                f"the schedule {kind_of(self.scheduler)} is stepped every {self.every}, and this fit has only"
                f" {length:,} {self.unit}: it never changes the learning rate. Give a shorter interval"
            )

    def check_length(self, steps: int | None, epochs: int | None, calls: int | None = None) -> None:
        """Check that a OneCycleLR takes as many steps as the run has.

        Args:
            steps: The run's steps; None if unknown.
            epochs: Its epochs, the last of them begun; None if unknown.
            calls: How often the run calls its `step()`; None counts by `every`.

        Raises:
            ConfigError: It is shorter, and would raise in the middle of the run.
        """
        length = {"steps": steps, "epochs": epochs}.get(self.unit)
        if not isinstance(self.scheduler, OneCycleLR) or not length:
            return
        if calls is None:
            calls = length // int(self.every.amount) if isinstance(self.every, Every) else length
        possible = self.scheduler.total_steps - self.scheduler.last_epoch
        if possible < calls:
            raise ConfigError(
                f"the schedule OneCycleLR can take {possible:,} steps, and this run of {length:,} {self.unit}"
                f" calls its step() {calls:,} times. Give it the run's length, which configure_optimizers"
                f" finds in self.run_length.{self.unit} (as in OneCycleLR(optimizer, max_lr,"
                f" total_steps=self.run_length.{self.unit})), or make the run shorter"
            )

    def resolve_direction(self, known: str | None) -> None:
        """Check that a ReduceLROnPlateau lowers the rate when the value stops improving.

        Args:
            known: The direction by the value's metric or name, "min" or "max"; None if unknown.

        Raises:
            ConfigError: Its mode is the default of torch, and may be wrong.
        """
        if not isinstance(self.scheduler, ReduceLROnPlateau) or self.metric is None:
            return
        mode, metric = str(self.scheduler.mode), self.metric
        if self.mode == "auto" and mode == "min" and known != "min":
            more = (
                f"more of {metric!r} is better"
                if known
                else f"it is unknown whether more of {metric!r} is better"
            )
            raise ConfigError(
                f"a ReduceLROnPlateau(mode='min'), which is torch's default, monitors {metric!r}, and {more}."
                " Give the scheduler mode='max'; or, if less is better,"
                f" TorchSchedule(..., metric={metric!r}, mode='min')"
            )

    def report(self) -> None:
        """Log that a scheduler follows steps, unless `every` says so."""
        if self.unit == "steps" and self.every is None and isinstance(self.scheduler, LRScheduler):
            name = type(self.scheduler).__name__
            _LOG.info(
                f"{name}.step() is called after each step. Where its arguments count epochs, return"
                f" TorchSchedule({name}(...), every='1 epoch')"
            )

    def is_due(self, unit: str, number: int) -> bool:
        """Return whether a step is due; see `step`."""
        return unit == self.unit and not (isinstance(self.every, Every) and number % int(self.every.amount))

    def step(
        self,
        unit: str,
        number: int,
        metrics: Mapping[str, float],
        step: Callable[[Any, float | None], None] | None = None,
    ) -> None:
        """Step the scheduler if it is due.

        Args:
            unit: What has just ended: "steps", "epochs" or "validations".
            number: Its number, from 1.
            metrics: The values by name; the same on all ranks.
            step: A function that steps the scheduler, given the value or None; by default its own `step`.

        Raises:
            ConfigError: The value was not logged, and it is required.
        """
        if not self.is_due(unit, number):
            return
        value = None
        if self.metric is not None:
            if self.metric not in metrics:
                if self.required:
                    raise ConfigError(
                        f"the schedule {type(self.scheduler).__name__} monitors {self.metric!r}, which was"
                        f" not logged. {nearest(self.metric, metrics).replace('Allowed:', 'Logged:')}"
                    )
                return
            value = metrics[self.metric]
        if step is not None:
            step(self.scheduler, value)
        elif value is None:
            self.scheduler.step()
        else:
            self.scheduler.step(value)


def kind_of(scheduler: Any) -> str:
    """Return a scheduler's class, with those of the schedulers that it consists of."""
    parts = getattr(scheduler, "_schedulers", None)
    inside = f"({', '.join(map(kind_of, parts))})" if isinstance(parts, (list, tuple)) else ""
    return f"{type(scheduler).__name__}{inside}"


def check_stateful(scheduler: Any) -> None:
    if not all(callable(getattr(scheduler, each, None)) for each in ("state_dict", "load_state_dict")):
        raise ConfigError(
            f"the schedule {type(scheduler).__name__} has no state_dict and load_state_dict, so that no"
            " checkpoint could hold it"
        )
