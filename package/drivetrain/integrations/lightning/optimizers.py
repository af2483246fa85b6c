"""The optimizers and schedules of a module's `configure_optimizers`, and when each schedule is stepped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.messages import logger
from drivetrain.integrations.lightning.closures import NoOptimizer
from drivetrain.task.optim.torch_schedule import TorchSchedule, check_stateful, kind_of

_LOG = logger(__name__)


@dataclass
class ScheduleConfig:
    """A schedule and when it is stepped, under Lightning's names.

    Attributes:
        scheduler: The schedule.
        name: A name for reports.
        interval: "step" or "epoch".
        frequency: The number of steps or epochs between two steps of the schedule.
        reduce_on_plateau: Whether it is given the value of `monitor`.
        monitor: The logged name.
        strict: Whether a missing value is an error.
    """

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        self.timed: TorchSchedule | None = None

    def prepare(self, optimizer: Optimizer) -> None:
        """Make the schedule one of ours, `timed`, which steps it when it is due."""
        metric = self.monitor if self.reduce_on_plateau else None
        timed = TorchSchedule(self.scheduler, Every(self.frequency, self.interval), metric, self.strict)
        self.timed = timed.made(optimizer)
        self.scheduler = self.timed.scheduler

    def check_length(
        self, steps: int | None, epochs: int | None, batches: int | None, accumulation: int
    ) -> None:
        """Check that the schedule takes as many steps as a fit has; see `TorchSchedule.check_length`.

        Args:
            steps: The fit's steps; None if unknown.
            epochs: Its epochs; None if unknown.
            batches: The batches of an epoch; None if unknown or not always the same.
            accumulation: The batches of a step.

        Raises:
            ConfigError: It is shorter.
        """
        calls = None
        if self.timed is None:
            return
        if self.interval == "step" and self.frequency > 1:
            if not steps or not batches:
                return
            due = self._due(batches, accumulation)
            whole, rest = divmod(steps, len(due))
            calls = whole * sum(due) + sum(due[:rest])
        try:
            self.timed.check_length(steps, epochs, calls)
        except ConfigError as error:
            error.add_note("A LightningModule finds it in self.trainer.estimated_stepping_batches")
            raise

    def warn_if_never(self, batches: int | None, accumulation: int, epochs: int | None) -> None:
        """Warn if a fit never steps the schedule.

        In Lightning, steps are counted by batches of an epoch, and the count begins anew in each epoch.

        Args:
            batches: The batches of an epoch; None if unknown.
            accumulation: The batches of a step.
            epochs: The epochs of the fit; None if unknown.
        """
        if self.timed is None:
            return
        if self.interval == "epoch":
            self.timed.warn_if_never(None, epochs)
        elif batches is not None and not any(self._due(batches, accumulation)):
            _LOG.warning(
                f"the schedule {kind_of(self.scheduler)} has interval='step' and frequency={self.frequency},"
                f" and an epoch has {batches:,} batches with a step after each {accumulation}. Lightning"
                " counts the batches of an epoch, anew in each epoch, so that the schedule is never stepped."
                " Give a smaller frequency"
            )

    def _due(self, batches: int, accumulation: int) -> list[bool]:
        """Return for each step of an epoch whether the schedule is stepped after it."""
        ends = (*range(accumulation, batches, accumulation), batches)
        return [number % self.frequency == 0 for number in ends]


_KEYS = tuple(each.name for each in fields(ScheduleConfig))


def read_optimizers(module: Any) -> tuple[list[Optimizer], list[ScheduleConfig]]:
    """Call a module's `configure_optimizers` and read what it returns, in any of Lightning's forms.

    Raises:
        ConfigError: It returns something else.
    """
    name = f"{type(module).__name__}.configure_optimizers"
    made = module.configure_optimizers()
    given, schedules, monitor = _parts(made, name)
    optimizers = [_made(each, module) for each in given]
    if not optimizers:
        if module.automatic_optimization:
            _LOG.warning(f"{name} returned {made!r}: training_step is run, and nothing is trained")
        return [NoOptimizer([each for each in module.parameters() if each.requires_grad])], []
    configs = [_config(each, monitor, name, module.automatic_optimization) for each in schedules]
    for each in configs:
        owner = getattr(each.scheduler, "optimizer", None)
        if owner is not None and not any(owner is known for known in optimizers):
            raise ConfigError(f"{name} returned a schedule of an optimizer that it did not return")
        check_stateful(each.scheduler)
    if module.automatic_optimization:
        if len(optimizers) > 1:
            raise ConfigError(
                f"{name} returned {len(optimizers)} optimizers. Set self.automatic_optimization = False and"
                " step them in training_step, as Lightning 2 asks for too"
            )
        for each in configs:
            each.prepare(optimizers[0])
    return optimizers, configs


def _parts(made: Any, name: str) -> tuple[list[Any], list[Any], str | None]:
    """Return optimizers, schedules, and what a single mapping monitors."""
    if made is None:
        return [], [], None
    if _is_optimizer(made):
        return [made], [], None
    if isinstance(made, Mapping):
        return (
            [_of_mapping(made, name)],
            [made["lr_scheduler"]] if made.get("lr_scheduler") is not None else [],
            made.get("monitor"),
        )
    if isinstance(made, (list, tuple)):
        if len(made) == 2 and isinstance(made[0], (list, tuple)) and all(map(_is_optimizer, made[0])):
            schedules = made[1] if isinstance(made[1], (list, tuple)) else [made[1]]
            return list(made[0]), list(schedules), None
        if made and all(isinstance(each, Mapping) for each in made):
            schedules = [
                _with_monitor(each["lr_scheduler"], each.get("monitor"))
                for each in made
                if each.get("lr_scheduler") is not None
            ]
            return [_of_mapping(each, name) for each in made], schedules, None
        if all(map(_is_optimizer, made)):
            return list(made), [], None
    raise ConfigError(
        f"{name} returned {type(made).__name__} in a form that Lightning does not know either. Allowed: an"
        " optimizer, a list of them, ([optimizers], [schedules]), a mapping with 'optimizer' and"
        " 'lr_scheduler', or a list of such mappings"
    )


def _of_mapping(made: Mapping[str, Any], name: str) -> Any:
    unknown = sorted(set(made) - {"optimizer", "lr_scheduler", "monitor"})
    if unknown or "optimizer" not in made:
        raise ConfigError(
            f"{name} returned a mapping with {', '.join(map(repr, made))}. Allowed: 'optimizer',"
            " 'lr_scheduler', 'monitor'"
        )
    return made["optimizer"]


def _with_monitor(schedule: Any, monitor: str | None) -> Any:
    if isinstance(schedule, Mapping):
        return {"monitor": monitor, **schedule} if monitor else schedule
    return {"scheduler": schedule, "monitor": monitor}


def _is_optimizer(made: Any) -> bool:
    return isinstance(made, (Optimizer, functools.partial))


def _made(given: Any, module: Any) -> Optimizer:
    """Return an optimizer; a partial one, as hydra makes it, is given the trained parameters."""
    made = (
        given([each for each in module.parameters() if each.requires_grad])
        if isinstance(given, functools.partial)
        else given
    )
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returned a {type(made).__name__} as an optimizer"
        )
    return made


def _config(given: Any, monitor: str | None, name: str, automatic: bool) -> ScheduleConfig:
    if isinstance(given, Mapping):
        unknown = [key for key in given if key not in _KEYS]
        if unknown or "scheduler" not in given:
            raise ConfigError(
                f"{name}: a schedule's mapping has {', '.join(map(repr, given))}. Allowed: 'scheduler', which"
                f" it must have, and {', '.join(map(repr, _KEYS[1:]))}"
            )
        config = ScheduleConfig(**given)
    else:
        config = ScheduleConfig(given)
    if isinstance(config.scheduler, ReduceLROnPlateau):
        config.reduce_on_plateau = True
    if config.reduce_on_plateau:
        config.monitor = config.monitor or monitor
        if config.monitor is None and automatic:
            raise ConfigError(
                f"{name}: a ReduceLROnPlateau needs the name of the logged value that it monitors:"
                " {'scheduler': ..., 'monitor': 'val_loss'}"
            )
    if config.interval not in ("step", "epoch"):
        raise ConfigError(f"{name}: interval={config.interval!r}. Allowed: 'step', 'epoch'")
    if type(config.frequency) is not int or config.frequency < 1:
        raise ConfigError(f"{name}: frequency={config.frequency!r} must be a whole number from 1")
    return config


class OptimizerView:
    """An optimizer as a module gets it: its `step` makes the run's step.

    Args:
        optimizer: The optimizer.
        step: Makes the step.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        self.optimizer = optimizer
        self._step = step
        self.toggle: Callable[[Any, bool], None] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the optimizer, for `isinstance` in a module or a schedule."""
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Call the closure, then make the step.

        Raises:
            ConfigError: Options for the optimizer's own step.
        """
        if options:
            raise ConfigError(f"optimizer.step({', '.join(options)}) takes a closure alone")
        result = None if closure is None else closure()
        self._step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer's parameters."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Run the block with only this optimizer's parameters requiring gradients.

        Args:
            sync_grad: Has no effect on values: gradients are always averaged over the ranks.
        """
        if self.toggle is None:
            raise ConfigError("toggle_model is for manual optimization")
        self.toggle(self, True)
        try:
            yield
        finally:
            self.toggle(self, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
