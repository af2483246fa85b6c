"""What a text on the command line becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from drivetrain.cli.values import arguments, convert, describe
from drivetrain.errors import ConfigError


@dataclass
class Policy:
    every: int | str
    best: int = 1


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("1_000", int, 1000),
        ("-2", int, -2),
        ("3", float, 3.0),
        ("1e-3", float, 0.001),
        ("False", bool, False),
        ("yes", bool, True),
        ("3", str, "3"),
        ("none", int | None, None),
        ("none", Optional[str], None),  # noqa: UP045 - users write it
        ("3", int | None, 3),
        ("2", int | str, 2),
        ("auto", int | str, "auto"),
        ("1", bool | int, 1),
        ("0.5", int | float, 0.5),
        ("3", float | int, 3),
        ("1 epoch", str | int | float | None, "1 epoch"),
        ("async", bool | str | Policy, "async"),
        ("true", bool | str | Policy, True),
        ("csv,jsonl", str | Sequence[str], ("csv", "jsonl")),
        ("csv", str | Sequence[str], "csv"),
        ("", str | Sequence[str], ()),
        ("none", str | Sequence[str], ()),
        ("1,2, 3", list[int], [1, 2, 3]),
        ("[1, 2]", list[int], [1, 2]),
        ("(0.9,0.95)", tuple[float, float], (0.9, 0.95)),
        ("1,2", tuple[float, ...], (1.0, 2.0)),
        ("[]", list[int], []),
        ('{"mode": "default"}', bool | Mapping[str, Any], {"mode": "default"}),
        ("a/b", Path, Path("a/b")),
        ("tanh", Literal["relu", "tanh"], "tanh"),
        ("2", Literal[1, 2], 2),
        ("3", Any, 3),
        ("x,y", Any, "x,y"),
        ("[1, 2", Any, "[1, 2"),
        ("[1, 2]", Any, [1, 2]),
    ],
)
def test_a_text_becomes_what_the_annotation_asks_for(text, hint, value):
    found = convert("task.x", text, hint)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint", "allowed"),
    [
        ("x", int, "a whole number"),
        ("1.5", int | None, "a whole number or none"),
        ("2", bool, "true or false"),
        ("x", bool | Mapping[str, Any], "true or false or a JSON object"),
        ("a,b", list[int], "a list (a,b,c)"),
        ("1,2,3", tuple[float, float], "a list (a,b,c)"),
        ("gelu", Literal["relu", "tanh"], "'relu' or 'tanh'"),
        ("[1]", dict[str, int], "a JSON object"),
        ("x", bytes, "another value"),
    ],
)
def test_a_text_that_does_not_fit_is_told_what_would(text, hint, allowed):
    with pytest.raises(ConfigError) as caught:
        convert("task.x", text, hint)
    assert str(caught.value) == f"task.x must be {allowed}, not {text!r}"
    assert describe(hint) == allowed


def test_parts_make_a_dataclass_or_a_mapping():
    assert convert("trainer.policy", {"every": "5", "best": 0}, bool | Policy) == Policy(5, 0)
    assert convert("trainer.policy", {"every": "5"}, Policy, build=False) == {"every": 5}
    assert convert("task.options", {"a": "1", "b": {"c": "x"}}, dict[str, Any]) == {"a": 1, "b": {"c": "x"}}


def test_values_of_a_file_are_taken_as_they_are():
    assert convert("task.x", 3, float) == 3
    assert convert("task.x", [1], Any) == [1]


def test_arguments_follow_annotations_then_defaults():
    def make(size: int, rate=0.5, name="x", other=None, *, flag: bool = False):
        return size, rate, name, other, flag

    given = {"size": "3", "rate": "1", "name": "7", "other": "7", "flag": "true"}
    assert make(**arguments("task", make, given)) == (3, 1.0, "7", 7, True)


def test_a_function_that_takes_any_keyword_is_given_them():
    def make(**options):
        return options

    assert make(**arguments("data", make, {"a": "1", "b": "x"})) == {"a": 1, "b": "x"}


def test_names_for_type_checkers_only_do_not_break_the_conversion():
    def make(size: "NotImported" = 3):  # noqa: F821, UP037
        return size

    assert arguments("task", make, {"size": "4"}) == {"size": 4}
