"""Compare a resumed run with an uninterrupted one, and name the first difference."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from drivetrain.checkpoint.inspection.compare import compare as compare_checkpoints
from drivetrain.checkpoint.saving.reading import open_checkpoint
from drivetrain.core.errors import ConfigError
from drivetrain.testing.resume.recording import Recorded

_SHOWN = 8
"""The number of states that differ at the end to name in a report."""

_ADVICE = {
    "samples": "The order of the data is drawn anew, or samples depend on a counter or a generator that no"
    " checkpoint holds. Draw from the global generators, which are seeded for each batch, or give the data"
    " state_dict and load_state_dict",
    "value": "It is computed from a variable that no checkpoint holds. Return it from a callback's"
    " state_dict, or keep it in an attribute of the task",
}
_STEP_ADVICE = (
    "A step depends on a number, a tensor or a random generator that no checkpoint holds. Keep it in an"
    " attribute of the task, or return it from a callback's state_dict and take it in load_state_dict; draw"
    " random numbers from the global generators"
)
_NOT_REPRODUCIBLE = (
    "Seed every generator that the program creates (random.Random(0), not random.Random()), and let nothing"
    " depend on the time or on the order of files in a directory. deterministic=True selects kernels that add"
    " in the same order each time"
)
_FIRST_EPOCH = (
    "no epoch had ended by the save after step {}, so state that only changes at the end of an epoch was"
    " not tested. Shorten the epochs to test it (--epoch 2, epoch=2)"
)
_GROUPS = {"model": "weight or buffer", "optimizer": "optimizer state"}
"""The groups of tensors in a checkpoint that are compared."""


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        step: The step, counted from 1.
        rank: The rank.
        kind: "samples", "result", "value" (a logged one), or a kind of state in the last checkpoint.
        name: The name, such as "loss".
        text: The values.
    """

    step: int
    rank: int
    kind: str
    name: str
    text: str

    def __str__(self) -> str:
        labels = {
            "samples": "the samples of step {step} differ",
            "result": "the {name} of step {step}",
            "value": "the value {name!r} of step {step}",
        }
        label = labels.get(self.kind, "{kind} {name!r} after step {step}")
        return f"{label.format(name=self.name, step=self.step, kind=self.kind)}: {self.text}"


@dataclass
class Report:
    """The result of a check.

    Attributes:
        steps: The number of compared steps.
        save_after: The step at which the run was resumed.
        ranks: The number of ranks.
        first: The first difference of the resumed run; None if there is none.
        later: The number of values that differ in the rows after the first.
        states: What differs between the last checkpoints.
        lost: The attributes that no checkpoint can hold.
        not_reproducible: The first difference between the uninterrupted and the killed run before the save.
            The resumed run is not compared if there is one.
        left_out: Names of logged values that were not compared because they differ between any two runs.
        in_first_epoch: Whether no epoch had ended when the run was saved.
    """

    steps: int
    save_after: int
    ranks: int
    first: Difference | None = None
    later: int = 0
    states: list[Difference] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    not_reproducible: Difference | None = None
    left_out: list[str] = field(default_factory=list)
    in_first_epoch: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the resumed run equals the uninterrupted one."""
        return self.not_reproducible is None and self.first is None

    def __str__(self) -> str:
        """Return the report as lines of text."""
        where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        begun = f"{self.steps} steps{where}, killed, resumed at step {self.save_after}"
        if self.not_reproducible is not None:
            lines = ["two runs from the start already differ, so resuming cannot be checked"]
            lines += [self._first_line(self.not_reproducible), _NOT_REPRODUCIBLE]
        elif self.first is None:
            lines = [f"{begun}: the runs are identical to the last bit"]
            lines += [_FIRST_EPOCH.format(self.save_after)] if self.in_first_epoch else []
        else:
            more = f"; differences after it: {self.later}" if self.later else ""
            lines = [f"{begun}: the run differs from the uninterrupted one"]
            lines.append(f"{self._first_line(self.first)}{more}")
            lines += [f"at the end: {each}" for each in self.states[:_SHOWN] if each is not self.first]
            lines += [f"and {len(self.states) - _SHOWN} more states"] if len(self.states) > _SHOWN else []
            lines += [f"no checkpoint can hold {', '.join(self.lost)}"] if self.lost else []
            lines.append(_ADVICE.get(self.first.kind, _STEP_ADVICE))
        if self.left_out:
            lines.append(f"not compared, since any two runs log different values: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _first_line(self, difference: Difference) -> str:
        where = f" on rank {difference.rank}" if self.ranks > 1 else ""
        return f"first difference{where}: {difference}"


def compare(
    uninterrupted: Sequence[Recorded],
    killed: Sequence[Recorded],
    resumed: Sequence[Recorded],
    ignore: Sequence[str] = (),
) -> Report:
    """Compare the records of the three runs, one for each rank.

    Args:
        ignore: Patterns of the names of values and weights that may differ, such as "history/*".

    Raises:
        ConfigError: A pattern matches no name.
    """
    save_after, first = resumed[0].base, uninterrupted[0]
    assert save_after is not None
    assert first.checkpoint is not None
    assert resumed[0].checkpoint is not None
    report = Report(len(first.steps), save_after, len(uninterrupted), lost=first.lost)
    begin, end = min(first.steps), max(first.steps)
    report.in_first_epoch = first.steps[begin]["epoch"] == first.steps[save_after + 1]["epoch"]
    states = [*_states(first.checkpoint, resumed[0].checkpoint, end)]
    values = {name for row in first.logged.values() for name in row}
    _check_patterns(ignore, {*values, *_names(first), *(each.name for each in states)})
    timed = {each for each in first.timed if any(fnmatchcase(name, each) for name in values)}
    early = [*_differences(uninterrupted, killed, begin, min(max(each.steps) for each in killed))]
    noise = {each.name for each in early if each.kind == "value" and not _matches(each.name, timed)}
    hidden = {*ignore, *noise, *timed}
    report.not_reproducible = next(iter(_left(early, hidden)), None)
    if report.not_reproducible is None:
        later = _differences(uninterrupted, resumed, save_after + 1, end)
        found = _left(later, hidden)
        report.left_out = sorted(noise | timed)
        report.states = _left(states, hidden)
        report.first, report.later = next(iter([*found, *report.states]), None), max(len(found) - 1, 0)
    return report


def _names(recorded: Recorded) -> set[str]:
    """Return the names of what is compared beside logged values."""
    stored = open_checkpoint(recorded.checkpoint or "").manifest.tensors
    results = {name for row in recorded.steps.values() for name in row["results"]}
    return {"samples", *results}.union(*(stored.get(group, ()) for group in _GROUPS))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(name == each or fnmatchcase(name, each) for each in patterns)


def _left(differences: Iterable[Difference], hidden: Iterable[str]) -> list[Difference]:
    return [each for each in differences if not _matches(each.name, hidden)]


def _check_patterns(ignore: Iterable[str], names: set[str]) -> None:
    for pattern in ignore:
        if not any(_matches(each, [pattern]) for each in names):
            close = ", ".join(map(repr, difflib.get_close_matches(pattern, names, n=5, cutoff=0.0)))
            raise ConfigError(f"nothing compared has a name like ignore={pattern!r}; the nearest are {close}")


def _differences(
    expected: Sequence[Recorded], found: Sequence[Recorded], begin: int, end: int
) -> Iterator[Difference]:
    """Yield what differs in the steps from `begin` to `end`: samples, results, and values that are logged."""
    for step in range(begin, end + 1):
        for rank, (one, other) in enumerate(zip(expected, found, strict=True)):
            mine, theirs = one.steps[step], other.steps.get(step)
            if theirs is None:
                yield Difference(step, rank, "result", "end", "missing")
                return
            if mine["samples"] != theirs["samples"]:
                text = _describe_samples(mine["samples"], theirs["samples"], one)
                yield Difference(step, rank, "samples", "samples", text)
            yield from _values(mine["results"], theirs["results"], step, rank, "result")
            if other.is_whole or step < end:  # a kill may come before the row of its step
                yield from _values(one.logged.get(step, {}), other.logged.get(step, {}), step, rank, "value")


def _values(
    expected: Mapping[str, Any], found: Mapping[str, Any], step: int, rank: int, kind: str
) -> Iterator[Difference]:
    for name in {**expected, **found}:
        first, second = (repr(each[name]) if name in each else "nothing" for each in (expected, found))
        if first != second:
            yield Difference(step, rank, kind, name, f"{second}, expected {first}")


def _describe_samples(expected: Sequence[str], found: Sequence[str], uninterrupted: Recorded) -> str:
    """Return in which steps the uninterrupted run has read these samples."""
    steps = [str(step) for step, row in uninterrupted.steps.items() if {*row["samples"]} & {*found}]
    if sorted(expected) == sorted(found):
        return "the same samples in another order"
    if not steps:
        return "samples that the uninterrupted run never read, or that were made differently"
    return f"the uninterrupted run reads some of these {len(found)} samples in step {', '.join(steps)}"


def _states(expected: str, found: str, step: int) -> Iterator[Difference]:
    """Yield what differs between two checkpoints: weights, buffers, optimizers and progress."""
    compared = compare_checkpoints(expected, found)
    for tensor in compared.tensors:
        if tensor.section in _GROUPS:
            yield Difference(step, 0, _GROUPS[tensor.section], tensor.name, f"another {tensor.kind}")
    for value in compared.values:
        if value.section in ("progress", "optimizers"):
            text = f"{value.second!r}, expected {value.first!r}"
            yield Difference(step, 0, value.section, value.name, text)
