"""What a user is told about a number or an option that cannot work."""

from __future__ import annotations

import math
from datetime import timedelta

import numpy as np
import pytest

from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import check_names, count, duration, flag, keywords, number, one_of


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1)])
def test_numbers_of_every_library_are_numbers(value):
    assert number("lr", value, above=0, at_most=1) == 1.0
    assert type(number("lr", value)) is float


@pytest.mark.parametrize("value", ["1", None, True, math.nan, math.inf, 0, -1, 1.5, 1j])
def test_what_is_no_number_within_bounds_is_refused_with_the_bounds(value):
    with pytest.raises(ConfigError, match="lr must be a finite number above 0 and at most 1, not"):
        number("lr", value, above=0, at_most=1)


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, None])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ConfigError, match="steps must be a whole number, at least 0, not"):
        count("steps", value)
    assert count("steps", np.int32(3)) == 3


def test_a_text_is_no_flag():
    assert flag("fused", True) is True
    with pytest.raises(ConfigError, match="fused must be True or False, not 'no'"):
        flag("fused", "no")


def test_a_wrong_word_is_told_the_nearest():
    assert one_of("mode", "min", ("min", "max")) == "min"
    with pytest.raises(ConfigError, match=r"unknown mode 'mni'\. Did you mean 'min'"):
        one_of("mode", "mni", ("min", "max"))


def test_a_function_that_takes_anything_judges_for_itself():
    assert keywords(lambda a, *, b=1: None) == {"a", "b"}
    assert keywords(lambda **anything: None) is None
    check_names("the optimizer", ["whatever"], None)
    with pytest.raises(ConfigError, match=r"the optimizer has no option 'bta'\. Did you mean 'beta'"):
        check_names("the optimizer", ["bta"], {"beta"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), (2, 2.0), (np.int64(60), 60.0), ("2 minutes", 120.0), (timedelta(hours=1), 3600.0)],
)
def test_a_duration_is_seconds_a_text_or_a_timedelta(value, expected):
    assert duration("hang_timeout", value) == expected


@pytest.mark.parametrize("value", [0, -1, True, "5 steps", float("nan")])
def test_what_is_no_duration_is_refused(value):
    with pytest.raises(ConfigError):
        duration("hang_timeout", value)
