"""When checkpoints are saved, and which of them are kept."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta

from drivetrain.errors import ConfigError
from drivetrain.options import by_name, count, flag, one_of
from drivetrain.types import Every

_MODES = ("min", "max")

# Two letters at least: one is a drive of Windows.
_MANGLED = re.compile(r"[a-z][a-z0-9+.-]+:[/\\](?![/\\])", re.ASCII | re.IGNORECASE)
"""How an address begins that a `pathlib.Path` has taken a slash from."""


@by_name
@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep. Two separate ideas, and one checkpoint may serve both.

    *Resume points* are saved every so often, and the newest few are kept, so that a run can go on. *Keepers*
    are the best few by a metric, so that the best model is still there at the end.

    Attributes:
        every: The interval between resume points ("500 steps", "1 epoch", "10 minutes"...); None saves only
            at the end.
        keep_last: How many resume points to keep; None for all. The newest checkpoint stays in any case until
            the next is committed.
        best: How many keepers to keep; 0 for none.
        by: The metric that ranks keepers, by its full name; None for no keepers.
        mode: Whether a "min"imal or a "max"imal value is best. NaN is never best, and of equals the earlier
            is better.
        asynchronous: Write in the background: training waits only for a copy of the state to the host's
            memory, and for the save before if that has not ended. An error of a write is raised after the
            next update.
        directory: Where the checkpoints, and the weights of a finished run, go instead of the run directory:
            a path, or an address such as "s3://bucket/run".

    Raises:
        ConfigError: A value that is not allowed.
    """

    every: Every | str | int | float | timedelta | None = "1 epoch"
    keep_last: int | None = 2
    best: int = 1
    by: str | None = "validation/loss"
    mode: str = "min"
    asynchronous: bool = False
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Check each value, and read the interval."""
        for name in ("keep_last", "best"):
            if getattr(self, name) is not None or name == "best":
                object.__setattr__(self, name, count(f"CheckpointConfig: {name}", getattr(self, name)))
        one_of("CheckpointConfig mode", self.mode, _MODES)
        flag("CheckpointConfig: asynchronous", self.asynchronous)
        by: object = self.by
        if by is not None and (not isinstance(by, str) or not by):
            raise ConfigError(
                f"CheckpointConfig: by must be a metric's name such as 'validation/loss', or None; not {by!r}"
            )
        _check_directory(self.directory)
        if self.every is not None:
            object.__setattr__(self, "every", Every(self.every))

    @property
    def interval(self) -> Every | None:
        """`every`, read: an interval, or None for only at the end."""
        return None if self.every is None else Every(self.every)

    @property
    def keepers(self) -> int:
        """How many keepers are kept; 0 also when no metric ranks them."""
        return 0 if self.by is None else self.best

    def is_better(self, value: float, other: float) -> bool:
        """Whether `value` is strictly better than `other`; never when it is NaN."""
        return value < other if self.mode == "min" else value > other


def _check_directory(directory: object) -> None:
    if directory is None:
        return
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"CheckpointConfig: directory must be a path, an address, or None; not {directory!r}"
        )
    if not isinstance(directory, str) and _MANGLED.match(path):
        raise ConfigError(
            f"CheckpointConfig: directory={directory!r} is no address any more, because a Path keeps only one"
            " of two slashes. Give an address as a text, such as 's3://bucket/run'"
        )
