"""The learning rate a user gets at each step, for every schedule."""

import json
import math
import random

import pytest
from tests.support.refusals import assert_refused

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import build_schedule
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.schedules import PlateauSchedule, make_schedule, warmed_up

DECAYS = ["linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"]
HALF = math.sqrt(0.5)
WAVE = [1, 0.5 + HALF / 2, 0.5, 0.5 - HALF / 2]


def rates(name: str, steps, warmup: int = 0, total: int | None = None, **options) -> list:
    schedule = make_schedule(name, warmup, total, options)
    return [schedule(step) for step in steps]


def test_warmup_begins_above_zero_and_ends_at_the_full_rate():
    assert rates("constant", range(6), warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert rates("constant_with_warmup", range(6), warmup=4) == rates("constant", range(6), warmup=4)
    schedule = warmed_up(lambda step: 1 / (1 + step), 3)
    assert [schedule(step) for step in range(5)] == pytest.approx([1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 5])
    assert make_schedule("constant") is None  # a rate that never changes costs the loop nothing
    assert make_schedule("constant_with_warmup", 0, 100) is None


@pytest.mark.parametrize("schedule", ["constant", "linear", lambda step: 1 - step / 10])
def test_warmup_power_changes_the_ramp_alone(schedule):
    def made(power):
        config = OptimizerConfig("sgd", schedule=schedule, warmup_steps=3, warmup_power=power)
        return [build_schedule(config, 10)(step) for step in range(10)]

    straight, squared = made(1), made(2)
    assert squared[:3] == pytest.approx([straight[0] * 0.25, straight[1] * 0.5, straight[2] * 0.75])
    assert squared[3:] == straight[3:]


@pytest.mark.parametrize(
    ("name", "steps", "arguments", "expected"),
    [
        ("linear", range(6), {"warmup": 1, "total": 5, "min_ratio": 0.2}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [1, 3, 5], {"warmup": 1, "total": 5, "min_ratio": 0.1}, [1, 0.55, 0.1]),
        ("cosine", range(7), {"total": 6, "cycles": 1.5}, [1, 0.5, 0, 0.5, 1, 0.5, 0]),
        ("cosine_with_restarts", range(10), {"warmup": 1, "total": 9, "cycles": 2}, [0.5, *WAVE, *WAVE, 0]),
        ("polynomial", range(5), {"total": 4, "power": 2}, [1, 0.5625, 0.25, 0.0625, 0]),
        ("inverse_sqrt", [0, 3, 4, 16, 96], {"warmup": 4}, [0.2, 0.8, 1, 0.5, 1 / math.sqrt(24)]),
        ("inverse_sqrt", [0, 30_000], {"timescale": 10_000}, [1, 0.5]),
        ("inverse_sqrt", [10**9], {"timescale": 1, "min_ratio": 0.01}, [0.01]),
    ],
)
def test_schedule_by_hand(name, steps, arguments, expected):
    assert rates(name, steps, **arguments) == pytest.approx(expected)


def test_warmup_stable_decay_by_hand_and_restarts_on_their_steps():
    for shape, middle in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - HALF)):
        options = {"decay_ratio": 0.2, "decay_shape": shape}
        got = rates("warmup_stable_decay", range(22), warmup=4, total=20, **options)
        assert got[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert got[4:17] == [1.0] * 13  # step 16 begins the decay of 4 steps
        assert got[18] == pytest.approx(middle)
        assert 0 < got[19] < got[18]
        assert got[20:] == [0, 0]
    for cycles in (3, 7, 11, 49):
        got = rates("cosine_with_restarts", range(cycles * 10), total=cycles * 10, cycles=cycles)
        assert [step for step, rate in enumerate(got) if rate == 1.0] == list(range(0, cycles * 10, 10))


@pytest.mark.parametrize("name", DECAYS)
def test_a_decay_peaks_at_one_and_stays_at_its_floor_after_the_last_step(name):
    for floor, warmup in ((0.0, 0), (0.1, 7), (1.0, 7)):
        got = rates(name, range(300), warmup=warmup, total=100, min_ratio=floor)
        assert got[warmup] == 1.0
        assert all(floor <= rate <= 1.0 for rate in got[warmup:])
        assert got[100:] == [floor] * 200
        assert got[99] > floor or floor == 1.0  # the last step that takes place is one step above the floor
        assert got[99] - floor <= (1 - floor) * 0.11
        assert all(later <= earlier for earlier, later in zip(got[warmup:], got[warmup + 1 :], strict=False))
    for total in (1, 2, 3, 10):  # no step of a run has rate zero
        assert all(rate > 0 for rate in rates(name, range(total), warmup=1, total=total))
    # A run shorter than its warm-up ramps, and then rests at the floor.
    assert rates(name, range(6), warmup=9, total=3) == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0])


def test_refusals_of_schedules():
    def refuse(name, **options):
        return lambda: make_schedule(name, 0, 100, options)

    def config(**options):
        return lambda: OptimizerConfig("sgd", **options)

    given = {"validation/los": 1.0, "train/loss": 2.0}
    cases = {
        "no length": (lambda: make_schedule("linear", 10, None), "max_steps", "total_steps"),
        "power without a warm-up": (config(warmup_power=2), "warmup_power=2 needs warmup_steps"),
        "misspelt": (refuse("cosin"), "'cosine'"),
        "misspelt option": (refuse("cosine", min_rato=0.1), "'min_ratio'"),
        "above 1": (refuse("linear", min_ratio=1.1), "at most 1"),
        "decay shape": (refuse("warmup_stable_decay", decay_shape="lines"), "'linear'"),
        "factor": (refuse("reduce_on_plateau", factor=1.0), "below 1"),
        "a metric": (lambda: plateau().observe(given), "Did you mean 'validation/los'", "'train/loss'"),
    }
    for factor in (None, "x", math.nan, -1.0):
        of_user = build_schedule(OptimizerConfig("sgd", lr=1.0, schedule=lambda step, each=factor: each), 9)
        cases[f"a factor of {factor}"] = lambda each=of_user: each(7), f"gave {factor!r} at step 7"
    assert_refused(ConfigError, cases)


def plateau(**options) -> PlateauSchedule:
    return PlateauSchedule(**{"patience": 1, "factor": 0.5, "threshold": 0.0, **options})


def observed(schedule: PlateauSchedule, values: list[float]) -> list[float]:
    return [(schedule.observe({schedule.metric: value}), schedule(1000))[1] for value in values]


@pytest.mark.parametrize(
    ("options", "values", "factors"),
    [
        ({}, [3, 2, 2, 2, 1, 1, 1], [1, 1, 1, 0.5, 0.5, 0.5, 0.25]),
        ({"patience": 0}, [3, 3, 3], [1, 0.5, 0.25]),
        ({"mode": "max", "metric": "validation/accuracy"}, [0.1, 0.2, 0.3, 0.3, 0.3], [1, 1, 1, 1, 0.5]),
        # 10 % better than 10 is below 9, and 10 % better than -10 is below -11.
        ({"patience": 0, "threshold": 0.1}, [10, 9.5, 8], [1, 0.5, 0.5]),
        ({"patience": 0, "threshold": 0.1}, [-10, -10.5, -12], [1, 0.5, 0.5]),
        ({"patience": 0, "threshold": 1, "threshold_mode": "abs"}, [10, 9.5, 8], [1, 0.5, 0.5]),
        ({"patience": 0, "cooldown": 2}, [1, 1, 1, 1, 1], [1, 0.5, 0.5, 0.5, 0.25]),
        ({"patience": 0, "min_ratio": 0.3}, [1, 1, 1, 1], [1, 0.5, 0.3, 0.3]),
    ],
    ids=["patience", "none", "max", "relative", "below zero", "absolute", "cooldown", "floor"],
)
def test_plateau_lowers_the_rate_by_hand(options, values, factors):
    assert observed(plateau(**options), values) == factors


def test_plateau_takes_a_value_that_is_not_finite_for_no_improvement():
    for broken in (math.nan, math.inf, -math.inf):
        schedule = plateau()
        assert observed(schedule, [broken, broken, 1.0, broken, broken]) == [1, 0.5, 0.5, 0.5, 0.25]
        assert schedule.state_dict()["best"] == 1.0


def test_plateau_goes_on_after_a_resume_as_if_never_stopped():
    values = [random.Random(3).choice([1.0, 2.0, 0.5, math.nan]) for _ in range(40)]
    expected = observed(plateau(cooldown=1), values)
    for cut in range(40):
        first, second = plateau(cooldown=1), plateau(cooldown=1)
        observed(first, values[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert observed(second, values[cut:]) == expected[cut:]
