"""The optimizers of a planned fit, and their rates over the run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from drivetrain.core.calendar import RunLength
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.engine.updater import OptimizerSpec, Updater, build_updaters, optimizer_specs
from drivetrain.run.settings import RunSettings
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.schedules import PlateauSchedule
from drivetrain.task.task import TaskModule

_SAMPLED = 100  # the number of steps at which a user's schedule is sampled to find its peak
_HORIZON = 10_000  # the steps to search for the peak if the run's length is unknown


@dataclass(frozen=True)
class Rate:
    """A learning rate, or another scheduled setting, over the run; None where it is unknown beforehand.

    Attributes:
        start: At step 0.
        peak: The highest; None with a scheduler of torch's, which knows its rates one after the other only.
        peak_step: The first step at the peak; None if the schedule follows tokens.
        end: At the last step.
        curve: At about a hundred steps from the first to the last one; empty where the end is unknown.
    """

    start: float
    peak: float | None
    peak_step: int | None
    end: float | None
    curve: tuple[float, ...] = ()


class Built(NamedTuple):
    """The optimizers of the run, made on the task's own parameters, which stay as they are.

    Attributes:
        specs: The configuration of each optimizer.
        updaters: The optimizers with their schedules, by name.
    """

    specs: Mapping[str, OptimizerSpec]
    updaters: Mapping[str, Updater]

    def rates(self, whole: Every | None) -> dict[str, Rate]:
        """Return the rates over a run of this length; None if it is unknown."""
        found = (_rates(updater, whole) for updater in self.updaters.values())
        return {key: rate for rates in found for key, rate in rates.items()}


def build(settings: RunSettings, task: TaskModule, length: RunLength) -> Built:
    """Return the optimizers of a run."""
    specs = optimizer_specs(task.configure_optimizers())
    unfused = {name: _unfused(spec) for name, spec in specs.items()}
    made = build_updaters(task, unfused, length.steps, settings.max_grad_norm, calendar=length.calendar)
    return Built(specs, made)


def _unfused(spec: OptimizerSpec) -> OptimizerSpec:
    """Return the specification without `fused=True`: fused kernels need a real device, with equal state."""
    if isinstance(spec, OptimizerConfig) and spec.fused:
        spec = copy.copy(spec)
        object.__setattr__(spec, "fused", None)  # the class is frozen
    return spec


def _rates(updater: Updater, whole: Every | None) -> dict[str, Rate]:
    """Return one optimizer's rates at the start, at the peak and at the end of the run."""
    updater.set_rate(Progress())
    starts = updater.scheduled_values()
    if updater.scheduler is not None:
        return {name: Rate(start, None, None, None) for name, start in starts.items()}
    ends = whole is not None and whole.unit == updater.unit
    horizon = int(whole.amount) if ends and whole is not None else _HORIZON
    # The named schedules peak just after the warm-up.
    points = {*range(0, horizon, -(-horizon // _SAMPLED)), updater.warmup, horizon - 1}
    history: dict[int, dict[str, float]] = {}
    for step in sorted(each for each in points if each < horizon):
        updater.set_rate(Progress(steps=step, tokens=step))
        history[step] = updater.scheduled_values()
    ended = ends and not isinstance(updater.schedule, PlateauSchedule)
    found: dict[str, Rate] = {}
    for name, start in starts.items():
        peak = max(history, key=lambda step: history[step][name])
        curve = tuple(each[name] for each in history.values()) if ended else ()
        first = peak if updater.unit == "steps" else None
        found[name] = Rate(start, history[peak][name], first, curve[-1] if ended else None, curve)
    return found
