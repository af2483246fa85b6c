"""The names under which a run logs and returns values: those that the task gives them, each for one value."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple, TypeVar

from drivetrain.core.direction import ENDS, direction_of
from drivetrain.core.errors import ConfigError
from drivetrain.engine.metrics.declared import DeclaredMetrics
from drivetrain.engine.metrics.means import is_loss
from drivetrain.task.task import TaskModule, overrides

T = TypeVar("T")

STAGES = ("train", "validation", "test", "predict")


_COUNT = "step"
_TAKEN = f"{_COUNT!r} is the number of steps in the tables of the loggers"


class ValueSource(NamedTuple):
    """Where a value comes from."""

    stage: str
    loader: str | None
    name: str
    kind: str = ""  # what a message says before the name

    def __str__(self) -> str:
        of = self.stage if self.loader is None else f"{self.stage} on {self.loader!r}"
        return f"{self.kind}{self.name!r} of {of}"


class MetricNames:
    """The names of one run.

    Attributes:
        are_own: Whether the task has names of its own, which do not begin with the stage.
        stages: The stages that have given values.
    """

    def __init__(self, task: TaskModule) -> None:
        self.are_own = overrides(task, "metric_name")
        self.stages: set[str] = set()
        self._task = task
        self._owner = type(task).__name__
        self._sources: dict[str, ValueSource | None] = {}  # None: a hook logs it
        self._directions: dict[str, str] = {}
        self._loaders: tuple[str, ...] = ()

    def named(
        self, values: Mapping[str, T], stage: str, loader: str | None = None, *, kind: str = ""
    ) -> dict[str, T]:
        """Return the values of a stage under their full names."""
        if values:
            self.stages.add(stage)
        full: dict[str, T] = {}
        for name, value in values.items():
            source = ValueSource(stage, loader, name, kind)
            given = self._task.metric_name(stage, loader, name)
            if given is None:
                continue
            if not isinstance(given, str) or not given or not given.isprintable():
                raise ConfigError(
                    f"{self._owner}.metric_name gave {given!r} for {source}; it returns the name, a text"
                    " without control characters, or None to leave the value out"
                )
            if given == _COUNT:
                raise ConfigError(
                    f"{self._owner}.metric_name gave {given!r} for {source}: {_TAKEN}. Use another"
                )
            other = self._sources.setdefault(given, source)
            if other != source:
                who = "a value that a hook logs" if other is None else str(other)
                raise ConfigError(
                    f"{who} and {source} are both named {given!r}. Have {self._owner}.metric_name return"
                    " another name for one of them, or log the hook's value under another name"
                )
            full[given] = value
        return full

    def declare(self, metrics: DeclaredMetrics | None, stage: str, loader: str | None = None) -> None:
        """Take over which way each declared metric of a stage is better, as far as the metrics say it."""
        self._loaders += () if loader is None else (loader,)
        for name, direction in metrics.directions().items() if metrics is not None else ():
            full = self._task.metric_name(stage, loader, name)
            if full is not None:
                self._directions[full] = direction

    def direction(self, name: str) -> str | None:
        """Return whether less or more of a value is better: "min" or "max", by the metric that gives it, else
        by its name; None if neither says it.
        """
        if name in self._directions:
            return self._directions[name]
        source = self._sources.get(name)
        given = name if source is None else source.name
        if source is None and stage_in(given) is not None:
            given = given.partition("/")[2]
            loader = next((each for each in self._loaders if given.startswith(f"{each}/")), "")
            given = given[len(loader) :]
        by_name = direction_of(given)
        # A metric that computes a mapping gives a value for each of its keys.
        of_metric = (self._directions[each] for each in self._directions if name.startswith(f"{each}/"))
        if (found := by_name or next(of_metric, None)) is not None:
            return found
        # A misspelt name is for the first evaluation to refuse, which knows all names.
        usual = {each.rpartition("/")[2]: way for each, way in self._directions.items()} | ENDS
        meant = get_close_matches(given.rpartition("/")[2], usual, n=1, cutoff=0.8)
        return usual[meant[0]] if meant else None

    def check_logged(self, name: str) -> None:
        """Check a name that a hook logs a value under."""
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError(f"run.log takes a name, a text without control characters, not {name!r}")
        if name == _COUNT:
            raise ConfigError(f"run.log({name!r}, ...): {_TAKEN}. Log the value under another name")
        source = self._sources.setdefault(name, None)
        if source is not None:
            raise ConfigError(
                f"run.log({name!r}, ...): this is the name of the task's {source}. Log the value under"
                f" another name, or have {self._owner}.metric_name return another one"
            )

    def stage_of(self, name: str) -> str | None:
        """Return the stage that gives a value; None for a value of a hook, or one that has not come yet."""
        source = self._sources.get(name)
        if source is not None:
            return source.stage
        return None if self.are_own else stage_in(name)

    def is_loss(self, name: str) -> bool:
        """Return whether a value is a loss, by the last part of the name that its step gave it."""
        source = self._sources.get(name)
        return is_loss((name if source is None else source.name).rpartition("/")[2])


def stage_in(name: str) -> str | None:
    """Return the stage that a name begins with, as in "validation/loss"."""
    first, slash, _ = name.partition("/")
    return first if slash and first in STAGES else None
