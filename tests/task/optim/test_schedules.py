"""The learning rate a user gets at each update, for every schedule."""

from __future__ import annotations

import json
import math
import random

import pytest

from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.task.optim.build import build_schedule
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.schedules import SCHEDULES, PlateauSchedule, make_schedule, warmed_up

DECAYS = ["linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"]


def rates(
    name: str, updates: range | list[int], warmup: int = 0, total: int | None = None, **options
) -> list:
    schedule = make_schedule(name, warmup, total, options)
    assert schedule is not None
    return [schedule(update) for update in updates]


def test_warm_up_begins_above_zero_and_ends_at_the_full_rate():
    assert rates("constant", range(6), warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates("constant_with_warmup", range(6), warmup=4) == rates("constant", range(6), warmup=4)


def test_a_rate_that_never_changes_costs_the_loop_nothing():
    assert make_schedule("constant") is None
    assert make_schedule("constant_with_warmup", 0, 100) is None


@pytest.mark.parametrize("schedule", ["constant", "linear", lambda update: 1 - update / 10])
def test_the_power_of_a_warm_up_changes_the_ramp_alone(schedule):
    def factors(power):
        config = OptimizerConfig("sgd", schedule=schedule, warmup_steps=3, warmup_power=power)
        return [build_schedule(config, 10)(update) for update in range(10)]

    straight, squared = factors(1), factors(2)
    ramp = [0.25, 0.5, 0.75]
    assert squared[:3] == pytest.approx([each * part for each, part in zip(straight, ramp, strict=False)])
    assert squared[3:] == straight[3:]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"warmup_power": 2}, "warmup_power=2 without a warm-up"),
        ({"warmup_power": 0, "warmup_steps": 3}, "warmup_power"),
        ({"warmup_power": 2, "warmup_steps": 3, "schedule": "reduce_on_plateau"}, "linear warm-up"),
    ],
)
def test_a_power_without_a_ramp_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        OptimizerConfig("sgd", **options)


def test_linear_by_hand():
    assert rates("linear", range(5), total=4) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates("linear", range(7), warmup=1, total=5, min_ratio=0.2) == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    )


def test_cosine_by_hand():
    half = math.sqrt(0.5)
    expected = [1, 0.5 + half / 2, 0.5, 0.5 - half / 2, 0]
    assert rates("cosine", range(5), total=4) == pytest.approx(expected)
    assert rates("cosine", [1, 3, 5], warmup=1, total=5, min_ratio=0.1) == pytest.approx([1, 0.55, 0.1])


def test_a_cosine_of_several_waves_rises_again():
    waves = [1, 0.5, 0, 0.5, 1, 0.5, 0]
    assert rates("cosine", range(7), total=6, cycles=1.5) == pytest.approx(waves)
    with pytest.raises(ConfigError, match="cycles of the schedule 'cosine'"):
        make_schedule("cosine", 0, 10, {"cycles": 0})


def test_cosine_with_restarts_starts_again_at_the_full_rate():
    # two cycles of four updates each, after a warm-up of one
    got = rates("cosine_with_restarts", range(10), warmup=1, total=9, cycles=2)
    half = math.sqrt(0.5)
    wave = [1, 0.5 + half / 2, 0.5, 0.5 - half / 2]
    assert got == pytest.approx([0.5, *wave, *wave, 0])


@pytest.mark.parametrize("cycles", [3, 7, 11, 49])
def test_every_restart_falls_on_its_update(cycles):
    got = rates("cosine_with_restarts", range(cycles * 10), total=cycles * 10, cycles=cycles)
    assert [update for update, rate in enumerate(got) if rate == 1.0] == list(range(0, cycles * 10, 10))


def test_polynomial_by_hand():
    assert rates("polynomial", range(5), total=4, power=2) == pytest.approx([1, 0.5625, 0.25, 0.0625, 0])
    assert rates("polynomial", range(9), total=8) == rates("linear", range(9), total=8)
    assert rates("polynomial", [2], total=4, power=2, min_ratio=0.5) == pytest.approx([0.625])


def test_inverse_sqrt_by_hand():
    assert rates("inverse_sqrt", [0, 3, 4, 16, 96], warmup=4) == pytest.approx(
        [0.2, 0.8, 1, 0.5, 1 / math.sqrt(24)]
    )
    assert rates("inverse_sqrt", [0, 30_000], timescale=10_000) == pytest.approx([1, 0.5])
    assert rates("inverse_sqrt", [30_000]) == pytest.approx([0.5])
    assert rates("inverse_sqrt", [10**9], timescale=1, min_ratio=0.01) == [0.01]


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_warmup_stable_decay_by_hand(shape, middle):
    got = rates("warmup_stable_decay", range(22), warmup=4, total=20, decay_ratio=0.2, decay_shape=shape)
    assert got[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert got[4:17] == [1.0] * 13  # update 16 begins the decay of 4 updates
    assert got[18] == pytest.approx(middle)
    assert 0 < got[19] < got[18]
    assert got[20:] == [0, 0]


def test_a_decay_that_meets_the_warm_up_is_shortened():
    got = rates("warmup_stable_decay", range(7), warmup=4, total=6, decay_ratio=1)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 0.5, 0])


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 7])
def test_a_decay_peaks_at_one_and_stays_at_its_floor_after_the_last_update(name, floor, warmup):
    got = rates(name, range(300), warmup=warmup, total=100, min_ratio=floor)
    assert got[warmup] == 1.0
    assert all(floor <= rate <= 1.0 for rate in got[warmup:])
    assert got[100:] == [floor] * 200
    assert got[99] > floor or floor == 1.0  # the last update that takes place is one step above the floor
    assert got[99] - floor <= (1 - floor) * 0.11
    assert all(later <= earlier for earlier, later in zip(got[warmup:], got[warmup + 1 :], strict=False))


@pytest.mark.parametrize("name", DECAYS)
def test_no_update_of_a_run_has_rate_zero(name):
    for total in (1, 2, 3, 10):
        assert all(rate > 0 for rate in rates(name, range(total), warmup=1, total=total))


@pytest.mark.parametrize("name", DECAYS)
def test_a_run_shorter_than_its_warm_up_ramps_and_then_rests_at_the_floor(name):
    assert rates(name, range(6), warmup=9, total=3) == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0])


@pytest.mark.parametrize("name", [*DECAYS, "inverse_sqrt"])
def test_the_rate_is_a_function_of_the_update_alone(name):
    order = list(range(120))
    forwards = rates(name, order, warmup=10, total=100, min_ratio=0.05)
    random.Random(0).shuffle(order)
    shuffled = dict(zip(order, rates(name, order, warmup=10, total=100, min_ratio=0.05), strict=True))
    assert [shuffled[update] for update in range(120)] == forwards


@pytest.mark.parametrize("name", DECAYS)
def test_a_decay_of_unknown_length_says_where_to_give_it(name):
    with pytest.raises(ConfigError, match=r"max_steps to the Trainer or total_steps to OptimizerConfig"):
        make_schedule(name, 10, None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cosin", {}, "Did you mean 'cosine'"),
        ("cosine", {"min_rato": 0.1}, "Did you mean 'min_ratio'"),
        ("cosine", {"total": 3}, "no option 'total'"),
        ("linear", {"min_ratio": 1.1}, "at most 1"),
        ("linear", {"min_ratio": -0.1}, "at least 0"),
        ("constant", {"min_ratio": 0.1}, "no option 'min_ratio'"),
        ("cosine_with_restarts", {"cycles": 0}, "at least 1"),
        ("cosine_with_restarts", {"cycles": 1.5}, "whole number"),
        ("polynomial", {"power": 0}, "above 0"),
        ("warmup_stable_decay", {"decay_ratio": 0}, "above 0"),
        ("warmup_stable_decay", {"decay_shape": "lines"}, "Did you mean 'linear'"),
        ("inverse_sqrt", {"timescale": 0}, "at least 1"),
        ("reduce_on_plateau", {"factor": 1.0}, "below 1"),
        ("reduce_on_plateau", {"mode": "maximum"}, "Did you mean 'max'"),
        ("reduce_on_plateau", {"patience": -1}, "at least 0"),
        ("reduce_on_plateau", {"threshold": math.nan}, "finite"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_what_is_allowed(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, 0, 100, options)


def test_a_function_is_warmed_up_like_a_named_schedule():
    schedule = warmed_up(lambda update: 1 / (1 + update), 3)
    assert [schedule(update) for update in range(5)] == pytest.approx([1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 5])


@pytest.mark.usefixtures("own_registries")
def test_another_package_can_add_a_schedule():
    SCHEDULES.register("test_step", lambda warmup, total, *, at=2: lambda update: float(update < at))
    assert rates("test_step", range(4), at=3) == [1, 1, 1, 0]


def plateau(**options) -> PlateauSchedule:
    return PlateauSchedule(**{"patience": 1, "factor": 0.5, "threshold": 0.0, **options})


def observed(schedule: PlateauSchedule, values: list[float]) -> list[float]:
    """The factor after each evaluation."""
    return [(schedule.observe({schedule.metric: value}), schedule(1000))[1] for value in values]


def test_the_rate_falls_when_the_metric_has_stalled_for_longer_than_patience():
    assert observed(plateau(), [3, 2, 2, 2, 1, 1, 1]) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25]
    assert observed(plateau(patience=0), [3, 3, 3]) == [1, 0.5, 0.25]


def test_more_may_be_better():
    schedule = plateau(mode="max", metric="validation/accuracy")
    assert observed(schedule, [0.1, 0.2, 0.3, 0.3, 0.3]) == [1, 1, 1, 1, 0.5]


def test_a_relative_threshold_works_on_both_sides_of_zero():
    # 10 % better than 10 is below 9, and 10 % better than -10 is below -11
    assert observed(plateau(patience=0, threshold=0.1), [10, 9.5, 8]) == [1, 0.5, 0.5]
    assert observed(plateau(patience=0, threshold=0.1), [-10, -10.5, -12]) == [1, 0.5, 0.5]
    absolute = plateau(patience=0, threshold=1, threshold_mode="abs")
    assert observed(absolute, [10, 9.5, 8]) == [1, 0.5, 0.5]


def test_after_a_fall_the_metric_is_given_time():
    assert observed(plateau(patience=0, cooldown=2), [1, 1, 1, 1, 1]) == [1, 0.5, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_no_improvement(mode, broken):
    schedule = plateau(mode=mode)
    assert observed(schedule, [broken, broken]) == [1, 0.5]
    assert observed(schedule, [1.0, broken, broken]) == [0.5, 0.5, 0.25]
    assert schedule.state_dict()["best"] == 1.0


def test_the_rate_never_falls_below_its_floor():
    schedule = plateau(patience=0, min_ratio=0.3)
    assert observed(schedule, [1, 1, 1, 1]) == [1, 0.5, 0.3, 0.3]
    assert schedule.observe({"validation/loss": 1}) is False  # nothing was lowered


def test_warm_up_multiplies_the_plateau_rate():
    schedule = make_schedule("reduce_on_plateau", 3, None, {"patience": 0, "factor": 0.5})
    assert isinstance(schedule, PlateauSchedule)
    observed(schedule, [1, 1])
    assert [schedule(update) for update in range(5)] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_a_missing_metric_is_an_error_that_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"Did you mean 'validation/los'.*'train/loss'"):
        plateau().observe({"validation/los": 1.0, "train/loss": 2.0})


def test_a_resumed_plateau_goes_on_as_if_never_stopped():
    values = [random.Random(3).choice([1.0, 2.0, 0.5, math.nan]) for _ in range(40)]
    whole = plateau(cooldown=1)
    expected = observed(whole, values)
    for cut in range(40):
        first = plateau(cooldown=1)
        observed(first, values[:cut])
        second = plateau(cooldown=1)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert observed(second, values[cut:]) == expected[cut:]


@pytest.mark.parametrize(
    "change",
    [{"ratio": "1"}, {"bad": -1}, {"best": math.nan}, {"cooling": 0.5}, {"extra": 1}, {"ratio": 2.0}],
)
def test_a_plateau_state_that_does_not_fit_is_refused_and_changes_nothing(change):
    schedule = plateau()
    before = schedule.state_dict()
    with pytest.raises(CheckpointError, match=next(iter(change))):
        schedule.load_state_dict({**before, **change})
    assert schedule.state_dict() == before
