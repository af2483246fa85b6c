"""Errors: what they say after a wrong name, what catches them, and that they travel between processes."""

from __future__ import annotations

import pickle

import pytest

from drivetrain.core import errors
from drivetrain.core.errors import DrivetrainError, MissingDependencyError, nearest

ALL = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, DrivetrainError) and each is not MissingDependencyError
]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("adamv", "adamw"), ("AdamW", "adamw"), ("sdg", "sgd"), ("ADAMX", "adamw"), ("mse", "MSE")],
)
def test_a_misspelt_name_is_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert nearest(name, ["sgd", "adamw", "MSE"]).startswith(f"Did you mean {meant!r}? ")


def test_all_allowed_names_are_listed_in_order_whatever_was_given() -> None:
    assert nearest("qqqq", ["b", "c", "a"]) == "Allowed: 'a', 'b', 'c'."
    assert nearest("qqqq", iter(["a"])) == "Allowed: 'a'."
    assert nearest("", ["a"]) == "Allowed: 'a'."
    assert nearest("a", []) == "Allowed: none."


def test_one_except_clause_catches_every_error_of_this_package() -> None:
    for kind in ALL:
        with pytest.raises(DrivetrainError, match="what went wrong"):
            raise kind("what went wrong")


def test_errors_are_also_what_python_calls_them() -> None:
    """So that code which knows nothing of this package handles them sensibly."""
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.NonFiniteError, ArithmeticError)
    assert issubclass(MissingDependencyError, ImportError)


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    error = MissingDependencyError("deepspeed", "deepspeed", "strategy 'zero3'")
    assert str(error) == (
        "strategy 'zero3' needs the package 'deepspeed', which is not installed. "
        "Install it with: pip install 'drivetrain[deepspeed]'"
    )


@pytest.mark.parametrize(
    "error",
    [*(kind("a message") for kind in ALL), MissingDependencyError("tqdm", "bar", "the bar")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_another_process_as_it_is(error: DrivetrainError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
