"""`drivetrain benchmark`: measure a task's steps under every combination of some settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from drivetrain.cli.printing import print_json
from drivetrain.cli.settings import Settings
from drivetrain.core.errors import ConfigError, DrivetrainError
from drivetrain.task.task import TaskModule
from drivetrain.testing.benchmark.benchmark import check_over, run_turns
from drivetrain.trainer.trainer import Trainer


def run_benchmark(settings: Settings, data: str, as_json: bool) -> None:
    """Run the benchmark, and print its table.

    Args:
        data: The name of the option that gives the training data.
    """
    over = _over(settings.option("over") or ())
    check_over(over, {"task": None, "data": None})
    for name, values in over.items():  # a wrong value is found now
        for value in values:
            _changed(settings, {name: value})
    found = run_turns(
        partial(_make, settings.words, data),
        over,
        rounds=_number(settings, "rounds", 3, int),
        seconds=_number(settings, "seconds", 2.0, float),
        limit=_number(settings, "limit", 600.0, float),
    )
    if as_json:
        print_json(found.to_json())
    else:
        print(found)
    if all(row.failure for row in found.rows):
        raise DrivetrainError(f"no combination could run. The first failed: {found.rows[0].failure}")


def _over(words: Sequence[str]) -> dict[str, list[str]]:
    over: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not values:
            raise ConfigError(f"--over {word}: write NAME=VALUE,VALUE, such as strategy=cpu,ddp")
        if name in over:
            raise ConfigError(f"--over gives {name} twice; give all its values at once")
        over[name] = re.split(r",(?![^\[({]*[\])}])", values)  # not inside of brackets
    return over


def _changed(settings: Settings, combination: Mapping[str, str]) -> Settings:
    return settings.changed(
        {name if "." in name else f"trainer.{name}": combination[name] for name in combination}
    )


def _make(
    words: tuple[str, str, Sequence[str]], data: str, combination: Mapping[str, str]
) -> tuple[Trainer, Callable[[], TaskModule], Callable[[], Any]]:
    settings = _changed(Settings(*words), combination)
    return settings.trainer(), partial(settings.make, "task"), partial(settings.make, data)


def _number(settings: Settings, name: str, default: Any, kind: type[Any]) -> Any:
    given = settings.option(name)
    try:
        return default if given is None else kind(given)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--{name} must be {what}, not {given!r}") from None
