"""Refused by `core`: intervals, schedules, numbers and words, names in registries, counts of a checkpoint."""

import math
from datetime import timedelta
from typing import Any

from tests.support.refusals import assert_refused

from drivetrain import ConfigError
from drivetrain.core.calendar import Calendar, Trigger
from drivetrain.core.errors import CheckpointError
from drivetrain.core.int_schedule import IntSchedule, ramp
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import host_state, load_host_state
from drivetrain.core.registry import Registry
from drivetrain.core.validation import check_names, count, duration, flag, number, one_of

COUNTED = Progress(7, 21, 84, 4_000_000_000_000, 2, 3, 9, 36, 1, 12.345678901234567)


def test_intervals_and_stages_that_are_refused() -> None:
    intervals: dict[Any, tuple[str, ...]] = {
        **dict.fromkeys(["", "_ steps", "1__0 steps", "-3 steps", None, True], ("not an interval",)),
        "3 epocs": ("unknown unit 'epocs' in the interval '3 epocs'", "Did you mean 'epochs'?"),
        "1T": ("unknown unit 'T'", "come before a unit, as in '10M tokens'"),
        "5 min": ("Did you mean 'minutes'",),
        **dict.fromkeys([0, "0 epochs", math.nan, "1e999 steps", timedelta(0)], ("must be positive",)),
        2.5: ("not a whole number of steps",),
        0.2: ("'0.2 epochs'", "the run the text '0.2'"),
        "10Mtokens": ("Did you mean 'tokens'?",),
        "0.5 tokens": ("not a whole number of tokens",),
        **dict.fromkeys([(), (2, 1), (1, 1), (-1,), (1.5,)], ("increasing whole numbers", "[0, 1, 2, 4]")),
    }
    schedules: dict[str, tuple[Any, str]] = {
        "empty": ({}, "empty mapping"),
        "start": ({"2 epochs": 4}, "no number for the start"),
        "units": ({0: 4, "2 epochs": 8, "100 steps": 2}, "different units"),
        "half an epoch": ({0: 4, "0.5 epochs": 8}, "steps, whole epochs, samples or tokens"),
        "twice": ({0: 4, 5: 8, "5 steps": 2}, "two numbers for the point '5 steps'"),
        "nothing": ({0: 4, "2 epochs": 0}, "from '2 epochs' on must be a whole number, at least 1"),
    }
    cases: dict[str, tuple[Any, ...]] = {
        **{repr(spec): (lambda spec=spec: Every(spec), *words) for spec, words in intervals.items()},
        "text and unit": (lambda: Every("3", "epochs"), "takes a number and a unit"),
        "length": (lambda: Trigger(Every("0.5 epochs"), None), "0.5 epochs needs data of known length"),
        "parts": (lambda: Trigger(Every("1.5 epochs"), Calendar(length=10)), "1.5 epochs needs whole epochs"),
        **{name: (lambda it=it: IntSchedule("steps", it), word) for name, (it, word) in schedules.items()},
        "ramp": (lambda: ramp(8, 30, over=10, by=4), "30 is not reached from 8 in steps of 4"),
    }
    assert_refused(ConfigError, cases)


def test_numbers_and_names_that_are_refused() -> None:
    bounds = "lr must be a finite number above 0 and at most 1, not"
    places = ("no_such_module:thing", "math:no_such_thing", "math")
    colours: Registry[Any] = Registry("colour", {"red": 1, "blue": 2})
    cases: dict[str, tuple[Any, ...]] = {
        "flag": (lambda: flag("fused", "no"), "fused must be True or False, not 'no'"),
        "word": (lambda: one_of("mode", "mni", ("min", "max")), "unknown mode 'mni'. Did you mean 'min'"),
        "option": (lambda: check_names("the optimizer", ["bta"], {"beta"}), "no option 'bta'", "'beta'"),
        "colour": (lambda: colours["rad"], "mean 'red'?", "Allowed: 'blue', 'red'"),
        "no text": (lambda: colours[None], "a colour is given by its name", "Allowed: 'blue', 'red'"),  # type: ignore[index]
        "taken": (lambda: colours.register("red", 4), "the colour 'red' is already registered"),
    }
    for bad in ("1", None, True, math.nan, 0, 1.5):
        cases[f"number {bad!r}"] = (lambda it=bad: number("lr", it, above=0, at_most=1), bounds)
    for bad in (True, 1.0, "1", -1):
        cases[f"count {bad!r}"] = (lambda it=bad: count("steps", it), "steps must be a whole number")
    for bad in (0, "5 steps", math.nan):
        cases[f"duration {bad!r}"] = (lambda it=bad: duration("hang_timeout", it), "hang_timeout")
    for bad in places:
        cases[f"place {bad}"] = (lambda it=bad: Registry("colour", {"red": it})["red"], bad)
    assert_refused(ConfigError, cases)
    assert colours["red"] == 1


def test_counts_and_generators_of_a_checkpoint_that_are_refused() -> None:
    progress, state = Progress(), COUNTED.to_json()
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "None": ({"steps": None}, "steps=None"),
        "text": ({"steps": "7"}, "steps='7'"),
        "bool": ({"steps": True}, "steps=True"),
        "negative": ({"position": -1}, "position=-1"),
        "NaN": ({"seconds": math.nan}, "seconds=nan"),
        "unknown": ({"updates": 3}, "does not fit: updates"),
    }
    missing = {name: value for name, value in state.items() if name != "tokens"}
    host = host_state()
    numpy = {**host["numpy"], "position": 999}
    load = progress.load_json
    cases: dict[str, tuple[Any, ...]] = {
        **{name: (lambda c=change: load({**state, **c}), word) for name, (change, word) in changes.items()},
        "missing": (lambda: load(missing), "does not fit: tokens"),
        "position": (lambda: load_host_state({**host, "numpy": numpy}), "999"),
    }
    assert_refused(CheckpointError, cases)
    assert progress == Progress()  # nothing is taken over
