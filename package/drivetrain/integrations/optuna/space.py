"""The space of a search: names with ranges, choices or Optuna's distributions, or a function of the trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from drivetrain.core.errors import ConfigError

Parameters = dict[str, Any]
"""The values of one trial, by name."""

_FORMS = (
    "a range (1e-5, 1e-2), (1e-5, 1e-2, 'log') or with a step (0, 100, 10), a list of choices [64, 128], or a"
    " distribution of Optuna"
)


class Space:
    """The space of a search.

    Attributes:
        distributions: Optuna's distribution of each name; empty for a function.

    Args:
        given: A mapping of names to ranges, choices or distributions; or a function that takes Optuna's trial
            and returns a mapping of names to values.

    Raises:
        ConfigError: It has another form; says which are allowed.
    """

    def __init__(self, given: object) -> None:
        self._function: Callable[[Any], object] | None = None
        self.distributions: dict[str, BaseDistribution] = {}
        if isinstance(given, Mapping):
            if not given:
                raise ConfigError("the space of the search is empty: name at least one parameter")
            for name, each in given.items():
                if not isinstance(name, str) or not name:
                    raise ConfigError(f"the names of the space must be texts, not {name!r}")
                self.distributions[name] = _distribution(name, each)
        elif callable(given) and not isinstance(given, type):
            self._function = given
        else:
            raise ConfigError(
                "the space must be a mapping of names to ranges, such as {'lr': (1e-5, 1e-2, 'log')}, or a"
                f" function of the trial that returns a mapping of names to values, not {given!r}"
            )

    def suggest(self, trial: optuna.Trial | optuna.trial.FrozenTrial) -> Parameters:
        """Return the trial's values; those that it has already stay.

        Raises:
            ConfigError: The function returned no mapping.
        """
        if self._function is None:
            for name, each in self.distributions.items():
                _suggest(trial, name, each)
            return {name: trial.params[name] for name in self.distributions}
        found = self._function(trial)
        if not isinstance(found, Mapping):
            raise ConfigError(
                "the function that is the space of the search must return a mapping of names to values, not"
                f" {found!r}"
            )
        return dict(found)

    def to_json(self) -> dict[str, str] | None:
        """Return the distributions as texts; None for a function."""
        if self._function is not None:
            return None
        return {name: distribution_to_json(each) for name, each in self.distributions.items()}


def differences(before: dict[str, str] | None, now: dict[str, str] | None) -> str:
    """Return how two spaces differ, by what `Space.to_json` has returned for each."""
    if before is None or now is None:
        kinds = ["a function" if each is None else "a mapping" for each in (before, now)]
        return f"it was {kinds[0]}, and is {kinds[1]}"
    found = []
    for name in {**before, **now}:
        was, is_now = (_told(each[name]) if name in each else "nothing" for each in (before, now))
        if was != is_now:
            found.append(f"{name}: was {was}, is {is_now}")
    return "; ".join(found)


def _told(text: str) -> str:
    each = json_to_distribution(text)
    if isinstance(each, CategoricalDistribution):
        return f"one of {', '.join(map(repr, each.choices))}"
    step = "" if each.step in (None, 1) else f" (step {each.step})"
    return f"{each.low} to {each.high}{' (log)' if each.log else step}"


def _suggest(trial: optuna.Trial | optuna.trial.FrozenTrial, name: str, each: BaseDistribution) -> None:
    if isinstance(each, FloatDistribution):
        trial.suggest_float(name, each.low, each.high, step=each.step, log=each.log)
    elif isinstance(each, IntDistribution):
        trial.suggest_int(name, each.low, each.high, step=each.step, log=each.log)
    elif isinstance(each, CategoricalDistribution):
        trial.suggest_categorical(name, each.choices)


def _distribution(name: str, given: object) -> BaseDistribution:
    if isinstance(given, (FloatDistribution, IntDistribution, CategoricalDistribution)):
        return given
    try:
        if isinstance(given, list) and given:
            odd = [each for each in given if not isinstance(each, (bool, int, float, str, type(None)))]
            if odd:
                raise ConfigError(
                    f"the choices of {name!r} must be numbers, texts, True, False or None, not {odd[0]!r}."
                    " Give their names, and choose by name in make_task"
                )
            if len(given) == 3 and given[2] == "log" and not isinstance(given[0], str):
                raise ConfigError(
                    f"{name!r} in the space is a list, which means choices, and 'log' would be one of them. A"
                    " range is (1e-5, 1e-2, 'log'), and 1e-5:1e-2:log in a file or a command line"
                )
            twice = [each for index, each in enumerate(given) if each in given[:index]]
            if twice:
                raise ConfigError(
                    f"the choices {given!r} of {name!r} have {twice[0]!r} twice, or a value equal to it. Give"
                    " each choice once"
                )
            return CategoricalDistribution(given)
        if isinstance(given, tuple):
            found = _range(given)
            if found is not None:
                return found
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the range {given!r} of {name!r} in the space is not possible: {error}") from error
    more = (
        f" A single value is a list with one item: [{given!r}]."
        if isinstance(given, (int, float, str))
        else ""
    )
    raise ConfigError(f"{name!r} in the space must be {_FORMS}; not {given!r}.{more}")


def _range(given: tuple[Any, ...]) -> BaseDistribution | None:
    low, high, how = given if len(given) == 3 else (*given, None) if len(given) == 2 else (None, None, None)
    numbers = [low, high] if how in (None, "log") else [low, high, how]
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in numbers):
        return None
    if any(isinstance(each, float) and not math.isfinite(each) for each in numbers):
        raise ValueError("its numbers must be finite")
    step, log = (None, how == "log") if how in (None, "log") else (how, False)
    if all(isinstance(each, int) for each in numbers):
        return IntDistribution(low, high, log=log, step=1 if step is None else step)
    return FloatDistribution(low, high, log=log, step=step)


def read_range(text: str) -> object:
    """Return the range or the choices that a text of a command line or a configuration file describes.

    "1e-5:1e-2:log" and "0:100:10" are ranges, and "64,128,256" is a list of choices.
    """
    parts = text.split(":")
    numbers = [read_value(each) for each in parts[:2]]
    if len(parts) in (2, 3) and all(isinstance(each, (int, float)) for each in numbers):
        how = [read_value(each) for each in parts[2:]]
        if how and how != ["log"] and not isinstance(how[0], (int, float)):
            raise ConfigError(f"the third part of the range {text!r} must be 'log' or a step, not {how[0]!r}")
        return (*numbers, *how)
    return [read_value(each.strip()) for each in text.split(",")]


def read_value(text: str) -> bool | int | float | str | None:
    """Return the number, the truth value or None that a text describes, or else the text."""
    if text.lower() in ("none", "null"):
        return None
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            found: int | float = kind(text)
            return found
        except ValueError:
            continue
    return text
