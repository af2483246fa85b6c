"""Learning-rate schedules: pure functions of the step number.

The learning rate of step u, counted from 0, is the group's base rate times ``factor(u)``. There is no other
input, so accumulation, ranks and restarts cannot change it, and resuming needs no state. `PlateauSchedule` is
the one exception: it observes a metric, and its few numbers are saved in the checkpoint.

The names and shapes are those of Hugging Face transformers, with one rule at both ends: **no step is spent
at rate 0**. The warm-up over `w` steps is ``(u + 1) / (w + 1)``, so step 0 already moves and step w is
the first at the full rate. A decay reaches its floor at ``u = total``, the first step after the run. The
last step, ``total - 1``, is one step above the floor. From ``total`` on the factor stays at the floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

from drivetrain.core.direction import MODES, direction_of, improves, resolved_direction
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.registry import Registry
from drivetrain.core.validation import check_names, count, keywords, number, one_of

Schedule: TypeAlias = Callable[[int], float]
"""A function from the step's number, counted from 0, to the factor of the base learning rate."""

ScheduleFactory: TypeAlias = Callable[..., Schedule | None]
"""``factory(warmup, total, **options)``: warm-up steps, all steps or None. It may return None: always 1.
"""

_Shape: TypeAlias = Callable[[int, int], float]
"""A function from ``(done, length)`` of a decay, in steps, to the rest of it: 1 at ``done = 0``, 0 at its
end.

The arguments are whole numbers, not their quotient, so that a restart falls on its step exactly."""


def warmed_up(schedule: Schedule, warmup: int, power: float = 1.0) -> Schedule:
    """Return `schedule` times a ramp over the first `warmup` steps: ``((u + 1) / (warmup + 1)) ** power``."""
    if not warmup:
        return schedule
    ramp = warmup + 1

    def factor(step: int) -> float:
        if step < warmup:
            return float(((step + 1) / ramp) ** power) * schedule(step)
        return schedule(step)

    return factor


def constant(warmup: int, total: int | None) -> Schedule | None:
    """Return the base rate after the warm-up; None without a warm-up, because the factor is always 1."""
    if not warmup:
        return None
    ramp = warmup + 1
    return lambda step: (step + 1) / ramp if step < warmup else 1.0


def _decaying(
    name: str, shape: _Shape, warmup: int, total: int | None, min_ratio: float, start: int | None = None
) -> Schedule:
    """Return warm-up, 1 until step `start` if there is one, then `shape` down to `min_ratio` at `total`."""
    floor = number(f"min_ratio of the schedule {name!r}", min_ratio, at_least=0, at_most=1)
    if total is None:
        raise ConfigError(
            f"the schedule {name!r} must know the number of steps in all, or of tokens if its lengths are in"
            " tokens, and the run has no such limit. Give the Trainer max_steps or max_tokens, the one in the"
            " unit of the warm-up and the other lengths, or give total_steps in it to OptimizerConfig"
        )
    ramp, end, span = warmup + 1, total, 1.0 - floor
    begin = warmup if start is None else max(start, warmup)
    length = end - begin

    def factor(step: int) -> float:
        if step >= end:
            return floor
        if step < warmup:
            return (step + 1) / ramp
        if step <= begin:
            return 1.0
        return floor + span * shape(step - begin, length)

    return factor


def _line(done: int, length: int) -> float:
    return (length - done) / length


def _half_cosine(done: float, length: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done / length))


def _one_minus_sqrt(done: int, length: int) -> float:
    return 1.0 - math.sqrt(done / length)


_DECAY_SHAPES: dict[str, _Shape] = {"linear": _line, "cosine": _half_cosine, "sqrt": _one_minus_sqrt}


def linear(warmup: int, total: int | None, *, min_ratio: float = 0.0) -> Schedule:
    """Return a straight line from 1 to `min_ratio`.

    Raises:
        ConfigError: `total` is unknown, or `min_ratio` is not in [0, 1]. All decays below raise it too.
    """
    return _decaying("linear", _line, warmup, total, min_ratio)


def cosine(warmup: int, total: int | None, *, cycles: float = 0.5, min_ratio: float = 0.0) -> Schedule:
    """Return `cycles` waves of a cosine between 1 and `min_ratio`, without restarts.

    The default, half a wave, falls from 1 to `min_ratio` (Loshchilov and Hutter, arXiv 1608.03983). With 1.5
    the rate falls, rises to 1 again and falls. From `total` on the factor is `min_ratio` in any case.
    """
    halves = 2 * number("cycles of the schedule 'cosine'", cycles, above=0)

    def shape(done: int, length: int) -> float:
        return _half_cosine(halves * done, length)

    return _decaying("cosine", shape if halves != 1 else _half_cosine, warmup, total, min_ratio)


def cosine_with_restarts(
    warmup: int, total: int | None, *, cycles: int = 1, min_ratio: float = 0.0
) -> Schedule:
    """Return `cycles` half cosines of equal length, each starting again at 1 (SGDR, arXiv 1608.03983)."""
    waves = count("cycles of the schedule 'cosine_with_restarts'", cycles, at_least=1)

    def shape(done: int, length: int) -> float:
        return _half_cosine(waves * done % length, length)

    return _decaying("cosine_with_restarts", shape, warmup, total, min_ratio)


def polynomial(warmup: int, total: int | None, *, power: float = 1.0, min_ratio: float = 0.0) -> Schedule:
    """Return a decay to `min_ratio`: the share of the run that is left, to a power; power 1 is `linear`."""
    exponent = number("power of the schedule 'polynomial'", power, above=0)

    def shape(done: int, length: int) -> float:
        return float(((length - done) / length) ** exponent)

    return _decaying("polynomial", shape, warmup, total, min_ratio)


def warmup_stable_decay(
    warmup: int,
    total: int | None,
    *,
    decay_ratio: float = 0.1,
    decay: int | None = None,
    decay_shape: str = "linear",
    min_ratio: float = 0.0,
) -> Schedule:
    """Return the full rate for most of the run, and a decay over the last `decay_ratio` of all steps.

    The source is MiniCPM (arXiv 2404.06395); `decay_shape` "sqrt" is ``1 - sqrt(done)`` (arXiv 2405.18392).

    Args:
        warmup: Steps of the warm-up.
        total: All steps, including the warm-up's.
        decay_ratio: The decay's share of `total`, rounded to whole steps, at least one. It is shorter if
            the warm-up leaves less.
        decay: The decay's length instead: a number of steps, or a length such as "1B tokens".
        decay_shape: "linear", "cosine" or "sqrt".
        min_ratio: The floor, as a fraction of the base rate.
    """
    share = number("decay_ratio of the schedule 'warmup_stable_decay'", decay_ratio, above=0, at_most=1)
    shape = _DECAY_SHAPES[one_of("decay_shape", decay_shape, _DECAY_SHAPES)]
    length = None if decay is None else count("decay of 'warmup_stable_decay'", decay, at_least=1)
    start = None if total is None else total - (length or max(1, round(share * total)))
    return _decaying("warmup_stable_decay", shape, warmup, total, min_ratio, start)


def inverse_sqrt(
    warmup: int, total: int | None, *, timescale: int | None = None, min_ratio: float = 0.0
) -> Schedule:
    """Return ``1 / sqrt(1 + (u - warmup) / timescale)``, at least `min_ratio` (Zhai et al., arXiv
    2106.04560).

    This decay has no end: it needs no `total`, and the run's last step has no special rate.

    Args:
        warmup: Steps of the warm-up.
        total: Not used.
        timescale: Steps, or a length such as "1B tokens", after which the rate has fallen to 0.71. Default:
            the warm-up's length, or 10 000 without a warm-up.
        min_ratio: The floor, as a fraction of the base rate.
    """
    floor = number("min_ratio of the schedule 'inverse_sqrt'", min_ratio, at_least=0, at_most=1)
    default = warmup or 10_000
    scale = default if timescale is None else count("timescale of 'inverse_sqrt'", timescale, at_least=1)
    ramp = warmup + 1

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / ramp
        return max(floor, 1.0 / math.sqrt(1.0 + (step - warmup) / scale))

    return factor


@final
class PlateauSchedule:
    """A schedule that lowers the rate when a metric stops improving; the only schedule with state.

    The rule is that of `torch.optim.lr_scheduler.ReduceLROnPlateau`, per evaluation, with two repairs. A
    relative threshold is a share of the best value's magnitude, so that it also works below zero. Only a
    finite value can be an improvement (NaN and infinities count as none).

    Args:
        warmup: Steps of the linear warm-up, which multiplies the rate.
        total: Not used.
        metric: The full name of an evaluation's value to monitor; a callback may log it in the evaluation.
        mode: "min" when less is better, "max" when more is. "auto" takes it from the metric's own
            `higher_is_better`, else from a well-known name; if neither says, the fit is refused.
        patience: Evaluations without improvement that are tolerated; the next one lowers the rate.
        factor: The factor that lowers the rate; between 0 and 1.
        threshold: The least difference from the best value that counts as an improvement.
        threshold_mode: "rel": `threshold` is a share of the best value's magnitude; "abs": it is a
            difference.
        cooldown: Evaluations after a lowering that do not count against `patience`.
        min_ratio: The floor, as a fraction of the base rate.

    Raises:
        ConfigError: A value that is out of bounds, or an unknown mode.
    """

    def __init__(
        self,
        warmup: int = 0,
        total: int | None = None,
        *,
        metric: str = "validation/loss",
        mode: str = "auto",
        patience: int = 10,
        factor: float = 0.1,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_ratio: float = 0.0,
    ) -> None:
        self.metric = metric
        self._warmup = warmup
        self._mode = one_of("mode", mode, MODES)
        self._direction = mode if mode != "auto" else direction_of(metric)
        self._patience = count("patience", patience)
        self._factor = number("factor", factor, above=0, below=1)
        self._threshold = number("threshold", threshold, at_least=0)
        self._relative = one_of("threshold_mode", threshold_mode, ("rel", "abs")) == "rel"
        self._cooldown = count("cooldown", cooldown)
        self._floor = number("min_ratio", min_ratio, at_least=0, at_most=1)
        self._ratio = 1.0
        self._best: float | None = None
        self._bad = 0
        self._cooling = 0

    def __call__(self, step: int) -> float:
        """Return the factor at a step: the warm-up's times the current ratio."""
        if step < self._warmup:
            return (step + 1) / (self._warmup + 1) * self._ratio
        return self._ratio

    def resolve_direction(self, known: str | None) -> None:
        """Take over whether less or more of the metric is better.

        Args:
            known: The direction by the metric or its name; None if it is unknown.

        Raises:
            ConfigError: The mode is "auto", and the direction is unknown.
        """
        argument = f"schedule_options={{{{'metric': {self.metric!r}, 'mode': {{}}}}}}"
        self._direction = resolved_direction(self._mode, known, self.metric, argument)

    def observe(self, metrics: Mapping[str, float]) -> bool:
        """Record an evaluation; return whether the rate was lowered.

        Args:
            metrics: The evaluation's metrics by their full names; the same on every rank.

        Raises:
            ConfigError: The monitored metric is missing; lists the metrics that are there. Or it is unknown
                whether a larger value is better.
        """
        if self._direction is None:
            self.resolve_direction(None)
        if self.metric not in metrics:
            raise ConfigError(
                f"the schedule 'reduce_on_plateau' monitors {self.metric!r}, which this evaluation did not "
                f"give. {nearest(self.metric, metrics)} Choose one with schedule_options={{'metric': ...}}"
            )
        value = float(metrics[self.metric])
        if improves(value, self._best, self._direction, self._threshold, self._relative):
            self._best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling -= 1
            self._bad = 0
        if self._bad <= self._patience:
            return False
        before, self._ratio = self._ratio, max(self._floor, self._ratio * self._factor)
        self._cooling, self._bad = self._cooldown, 0
        return self._ratio < before

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the current ratio, the best value and the counts, as plain numbers for JSON."""
        return {"ratio": self._ratio, "best": self._best, "bad": self._bad, "cooling": self._cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        best = None if state["best"] is None else float(state["best"])
        bad, cooling = int(state["bad"]), int(state["cooling"])
        self._ratio, self._best, self._bad, self._cooling = float(state["ratio"]), best, bad, cooling


LENGTHS = ("decay", "timescale")
"""The options of schedules that are lengths."""

SCHEDULES: Registry[ScheduleFactory] = Registry(
    "schedule",
    {
        "constant": constant,
        "constant_with_warmup": constant,
        "linear": linear,
        "cosine": cosine,
        "cosine_with_restarts": cosine_with_restarts,
        "polynomial": polynomial,
        "inverse_sqrt": inverse_sqrt,
        "warmup_stable_decay": warmup_stable_decay,
        "reduce_on_plateau": PlateauSchedule,
    },
)
"""Schedules by name; each is called with the warm-up's steps, all steps and its options."""


def make_schedule(
    name: str, warmup: int = 0, total: int | None = None, options: Mapping[str, Any] | None = None
) -> Schedule | None:
    """Return the schedule registered under `name`; None when its factor is always 1, so that the loop skips
    it.

    Args:
        name: A row of `SCHEDULES`.
        warmup: Steps of the linear warm-up.
        total: All steps of the run, or None if unknown.
        options: The schedule's options.

    Raises:
        ConfigError: An unknown name or option, a value out of bounds, or an unknown `total` that the schedule
            needs.
    """
    factory = SCHEDULES[name]
    allowed = keywords(factory)
    check_names(f"the schedule {name!r}", options or {}, allowed and allowed - {"warmup", "total"})
    return factory(warmup, total, **(options or {}))
