"""The policies of a run's checkpoints: when to save, and what to keep."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from drivetrain.core.direction import MODES, direction_of, resolved_direction
from drivetrain.core.errors import ConfigError, repr_without_secrets
from drivetrain.core.files import check_path
from drivetrain.core.intervals import Every
from drivetrain.core.validation import by_name, count, flag, one_of

_OF_RUN = ("asynchronous", "parameters", "directory", "resumable")
"""The fields that all policies of a run share, because one file serves them all."""

# Two letters at least: one is a drive of Windows.
_MANGLED = re.compile(r"[a-z][a-z0-9+.-]+:[/\\](?![/\\])", re.ASCII | re.IGNORECASE)
"""The start of an address that `pathlib.Path` has stripped of a slash."""


@by_name
@dataclass(frozen=True)
class CheckpointConfig:
    """The policy for saving and keeping checkpoints. A checkpoint may be of one kind or of both.

    *Resume points* are saved at an interval, and the newest few are kept, so that a run can resume. *Best
    checkpoints* are the best few by a metric, so that the best model still exists at the end.

    A run may have several policies: `Trainer(checkpoint=[CheckpointConfig(...), ...])`. Policies that ask for
    a checkpoint at the same step share one, and it is deleted once none of them keeps it. Each has its own
    `every`, `keep_last`, `best`, `by` and `mode`; the other fields belong to the run, and must be equal in
    all policies. Each policy must give `best`, the number that it keeps, or `by=None`. A save outside of any
    interval (at the end of the run, at a signal, by `run.save()`) is a resume point of the first policy.

    Attributes:
        every: The interval between resume points ("500 steps", "1 epoch", "10 minutes"...); None saves only
            at the end.
        keep_last: The number of resume points to keep; None keeps all. The newest checkpoint is always kept
            until the next is committed.
        best: The number of best checkpoints to keep; 0 disables them. None keeps one if the fit validates.
            Giving a number, or another `by`, is an error in a fit that cannot give the metric.
        by: The full name of the metric that ranks checkpoints; None disables them.
        mode: "min" if the smallest value is best, "max" if the largest. "auto" takes it from the metric's own
            `higher_is_better`, else from a well-known name (a loss, an error, an accuracy, ...); if neither
            says, the fit is refused. NaN is never best, and of equal values the earlier is better.
        restore_best: Whether the end of a fit loads the weights of the best checkpoint into the task, so that
            the finished weights are the best ones. An error or a signal ends the fit without that. Only one
            of several policies may ask for it.
        asynchronous: Write in the background: training waits only for a copy of the state to the host's
            memory, and for the previous save if that has not ended. A write error is raised after the next
            step.
        parameters: "all", or "trainable" to leave out the frozen parameters, such as a pretrained model under
            adapters. None leaves out those that the task's `ModelInfo` names, by default none.
            All buffers stay, because training changes the buffers of frozen modules too (running statistics).
            A checkpoint then has a fingerprint of the frozen parameters; the program makes them again, and a
            resume checks that they are the same.
        directory: The directory for the checkpoints and the finished run's weights, instead of the run
            directory: a path, or an address such as "s3://bucket/run".
        resumable: Whether a run can resume from its checkpoints. If not, they hold only the weights and the
            task's arguments, without the optimizer state and the other state of a run.

    Raises:
        ConfigError: A value that is not allowed.
    """

    every: Every | str | int | float | timedelta | None = "1 epoch"
    keep_last: int | None = 2
    best: int | None = None
    by: str | None = "validation/loss"
    mode: str = "auto"
    restore_best: bool = False
    asynchronous: bool = False
    parameters: str | None = None
    directory: str | os.PathLike[str] | None = None
    resumable: bool = True

    __repr__ = repr_without_secrets

    def __post_init__(self) -> None:
        """Check each value, and parse the interval."""
        for name in ("keep_last", "best"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, count(f"CheckpointConfig: {name}", getattr(self, name)))
        one_of("CheckpointConfig mode", self.mode, MODES)
        if self.parameters is not None:
            one_of("CheckpointConfig parameters", self.parameters, ("all", "trainable"))
        for name in ("restore_best", "asynchronous", "resumable"):
            flag(f"CheckpointConfig: {name}", getattr(self, name))
        if self.restore_best and not self.best_count:
            raise ConfigError(
                f"CheckpointConfig(restore_best=True, best={self.best}, by={self.by!r}) keeps no best"
                " checkpoint to restore: give best=1 and a metric by="
            )
        by: object = self.by
        if by is not None and (not isinstance(by, str) or not by):
            raise ConfigError(
                f"CheckpointConfig: by is a metric such as 'validation/loss', or None, not {by!r}"
            )
        _check_directory(self.directory)
        if self.every is not None:
            try:
                object.__setattr__(self, "every", Every(self.every))
            except ConfigError as error:
                raise ConfigError(f"CheckpointConfig: every: {error}") from None

    @property
    def interval(self) -> Every | None:
        """The parsed interval `every`; None saves only at the end."""
        return None if self.every is None else Every(self.every)

    @property
    def interval_name(self) -> str | None:
        """The interval's name in the index of checkpoints, such as "500 steps"."""
        return None if self.every is None else str(self.every)

    @property
    def best_count(self) -> int:
        """The number of best checkpoints to keep; 0 if no metric ranks them."""
        if self.by is None:
            return 0
        return 1 if self.best is None else self.best

    def with_direction(self, known: str | None) -> CheckpointConfig:
        """Return this policy with the mode "min" or "max", if it ranks.

        Args:
            known: The direction of `by`, as its metric or its name gives it; None if it is unknown.

        Raises:
            ConfigError: The mode is "auto", and the direction is unknown.
        """
        if self.by is None or not self.best_count:
            return self
        mode = resolved_direction(self.mode, known, self.by, f"CheckpointConfig(by={self.by!r}, mode={{}})")
        return self if mode == self.mode else replace(self, mode=mode)

    @property
    def direction(self) -> str:
        """The mode: "min" or "max", by the name of the metric if it is "auto".

        Raises:
            ConfigError: The mode is "auto", and the name says nothing.
        """
        if self.mode != "auto":
            return self.mode
        return self.with_direction(direction_of(str(self.by))).mode


def _check_directory(directory: object) -> None:
    if directory is None:
        return
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise ConfigError(f"CheckpointConfig: directory is a path, an address or None, not {directory!r}")
    if not isinstance(directory, str) and _MANGLED.match(path):
        raise ConfigError(
            f"CheckpointConfig: directory={directory!r} is not an address, because a Path keeps only one of"
            " two slashes. Give an address as a text, such as 's3://bucket/run'"
        )
    if "://" not in path:
        check_path(path)


def as_policies(given: CheckpointConfig | Sequence[CheckpointConfig]) -> tuple[CheckpointConfig, ...]:
    """Return one policy or several as a tuple, after a check that they go together."""
    policies = (given,) if isinstance(given, CheckpointConfig) else tuple(given)
    wrong = [each for each in policies if not isinstance(each, CheckpointConfig)]
    if wrong or not policies:
        raise ConfigError(
            "checkpoint as a list takes one CheckpointConfig or more, not"
            f" {repr(wrong[0]) if wrong else 'an empty list; checkpoint=False saves none'}"
        )
    if sum(each.restore_best for each in policies) > 1:
        raise ConfigError(
            "several policies of checkpoint= have restore_best=True, and a task has one set of weights: give"
            " it in one of them"
        )
    if len(policies) > 1:
        _check_together(policies)
    return policies


def _check_together(policies: Sequence[CheckpointConfig]) -> None:
    """Check that several policies say how many they keep, and contradict one another in nothing."""
    modes = dict[str, str]()
    for number, each in enumerate(policies, start=1):
        for name in _OF_RUN:
            mine, theirs = getattr(each, name), getattr(policies[0], name)
            if mine != theirs:
                raise ConfigError(
                    f"the policies of checkpoint= contradict each other: {name}={theirs!r} in the first, and"
                    f" {name}={mine!r} in number {number}. {name} is of the run: give all the same"
                )
        if each.by is not None and each.best is None:
            raise ConfigError(
                f"policy number {number} of checkpoint= does not say how many it keeps by {each.by!r}."
                " Each of several policies must say it: best=1, or best=0 for none"
            )
        if each.by is not None and each.best_count and modes.setdefault(each.by, each.mode) != each.mode:
            raise ConfigError(
                f"the policies of checkpoint= contradict each other: they rank by {each.by!r} with"
                f" mode={modes[each.by]!r} and with mode={each.mode!r}. Give one of them"
            )


def chosen_policies(checkpoint: object) -> tuple[CheckpointConfig, ...]:
    """Return the policies that a user has written as `Trainer(checkpoint=)`; none for a bool or "async"."""
    if isinstance(checkpoint, CheckpointConfig):
        return (checkpoint,)
    return checkpoint if isinstance(checkpoint, tuple) else ()


def rankings(policies: Sequence[CheckpointConfig]) -> dict[str, CheckpointConfig]:
    """Return the policies that keep the best, by their metrics; of equal metrics the one that keeps most."""
    found: dict[str, CheckpointConfig] = {}
    for each in policies:
        if each.by is not None and each.best_count > (found[each.by].best_count if each.by in found else 0):
            found[each.by] = each
    return found
