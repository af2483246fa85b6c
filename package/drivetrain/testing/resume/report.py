"""Compare a resumed run with an uninterrupted one, step by step, and name the first difference."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from drivetrain.core.errors import ConfigError
from drivetrain.testing.resume.recording import KILLED, RESUMED, UNINTERRUPTED
from drivetrain.testing.resume.rows import Recorded, Values, read

_SHOWN = 8
"""The number of values that were not restored to name in a report."""

_LABELS = {
    "samples": "the samples of step {step} differ",
    "result": "the {name} of step {step}",
    "value": "the value {name!r} of step {step}",
}
"""How a report names a value, by its kind; of other kinds, it names the state after the step."""

_ADVICE = {
    "samples": "The order of the data is drawn anew, or samples depend on a counter or a generator that no"
    " checkpoint holds. Draw from the global generators, which are seeded for each batch, or give the data"
    " state_dict and load_state_dict",
    "buffer": "A buffer is saved unless it was registered with persistent=False",
    "value": "It is computed from an attribute that no checkpoint holds. Return the attribute from a"
    " callback's state_dict or a module's get_extra_state, or make it a buffer",
}
_STEP_ADVICE = (
    "A step depends on a number, a tensor or a random generator that no checkpoint holds. Keep it in a buffer"
    " (not with persistent=False), in a module's get_extra_state and set_extra_state, or in a callback's"
    " state_dict and load_state_dict; draw random numbers from the global generators"
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


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        step: The step, counted from 1.
        rank: The rank.
        kind: "samples", "result", "value" (a logged one), "weight", "buffer", "optimizer state", "learning
            rate", "generator", "progress", "state" or "step".
        name: The name, such as "net.0.weight".
        found: The text of the value in the second run.
        expected: The text of the value in the first run.
    """

    step: int
    rank: int
    kind: str
    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        label = _LABELS.get(self.kind, "{kind} {name!r} after step {step}")
        what = label.format(kind=self.kind, name=self.name, step=self.step)
        expected = "" if self.kind == "samples" else f", expected {_shorter(self.expected)}"
        return f"{what}: {_shorter(self.found)}{expected}"


@dataclass
class Report:
    """The result of a check.

    Attributes:
        steps: The number of compared steps.
        save_after: The step at which the run was resumed.
        ranks: The number of ranks.
        first: The first difference of the resumed run; None if there is none.
        later: The number of differences after the first.
        not_restored: What differed before the resumed run made a step.
        unsaved: Warnings of tensors that no checkpoint holds.
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
    not_restored: list[Difference] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
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
            lines += [f"not restored: {each}" for each in self.not_restored[:_SHOWN]]
            if len(self.not_restored) > _SHOWN:
                lines.append(f"and {len(self.not_restored) - _SHOWN} more values")
            cause = (self.not_restored or [self.first])[0].kind
            lines += [*self.unsaved, _ADVICE.get(cause, _STEP_ADVICE)]
        if self.left_out:
            lines.append(f"not compared, since any two runs log different values: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _first_line(self, difference: Difference) -> str:
        where = f" on rank {difference.rank}" if self.ranks > 1 else ""
        return f"first difference{where}: {difference}"


def _shorter(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:80]}..."


def compare(directory: Path, ignore: Sequence[str] = ()) -> Report:
    """Compare the records of the three runs.

    Args:
        directory: The directory of the records.
        ignore: Patterns of the names of values and weights that may differ, such as "history/*".

    Raises:
        ConfigError: Nothing has a name that a pattern matches.
    """
    uninterrupted, killed, resumed = (read(directory, kind) for kind in (UNINTERRUPTED, KILLED, RESUMED))
    _check_patterns(ignore, set().union(*(each.names() for each in (*uninterrupted, *killed, *resumed))))
    save_after = resumed[0].base
    assert save_after is not None
    report = Report(len(uninterrupted[0].steps), save_after, len(uninterrupted))
    report.in_first_epoch = _is_first_epoch(uninterrupted[0], save_after)
    noise: set[str] = set()
    for rank, (first, second) in enumerate(zip(uninterrupted, killed, strict=True)):
        _compare_starts(report, rank, first, second, ignore, noise)
    if report.not_reproducible is None:
        report.left_out = sorted(noise.union(*(each.timed for each in uninterrupted)))
        for rank, (first, third) in enumerate(zip(uninterrupted, resumed, strict=True)):
            _compare_resumed(report, rank, first, third, ignore, noise)
        report.unsaved = sorted({each.unsaved for each in (*uninterrupted, *killed, *resumed)} - {""})
    return report


def _check_patterns(ignore: Iterable[str], names: set[str]) -> None:
    for pattern in ignore:
        if not any(pattern == each or fnmatchcase(each, pattern) for each in names):
            close = ", ".join(map(repr, difflib.get_close_matches(pattern, names, n=5, cutoff=0.0)))
            raise ConfigError(
                f"nothing that is compared has a name like ignore={pattern!r}; the nearest names are {close}"
            )


def _is_first_epoch(uninterrupted: Recorded, save_after: int) -> bool:
    """Return whether the first step after the save belongs to the epoch in which the run began."""
    first, following = (uninterrupted.values(each) for each in (min(uninterrupted.steps), save_after + 1))
    epoch = ("result", "epoch")
    return epoch in following and first[epoch] == following[epoch]


def _compare_starts(
    report: Report, rank: int, first: Recorded, second: Recorded, ignore: Sequence[str], noise: set[str]
) -> None:
    """Compare two runs before the kill. A logged value that differs is left out: it may be a time."""
    for step in sorted(first.logged.keys() & second.logged.keys()):
        differing = _differences(first.logged[step], second.logged[step], step, rank, ignore)
        is_killed = step == max(second.steps, default=0)  # perhaps before it had logged all
        noise.update(each.name for each in differing if not is_killed or each.found != "nothing")
    for step in sorted(first.steps.keys() & second.steps.keys()):
        found = _differences(first.steps[step], second.steps[step], step, rank, ignore)
        known = report.not_reproducible
        if found and (known is None or step < known.step):
            report.not_reproducible = _describe_samples(found[0], first)


def _compare_resumed(
    report: Report, rank: int, first: Recorded, third: Recorded, ignore: Sequence[str], noise: set[str]
) -> None:
    at, found = report.save_after, list[Difference]()
    for step in sorted(each for each in first.steps.keys() | first.logged.keys() if each > at):
        if step in first.steps and step not in third.steps:
            found.append(Difference(step, rank, "result", "end", "missing", "made"))
            break
        found += _differences(first.values(step), third.values(step), step, rank, ignore, noise)
    report.later = max(report.later, len(found) - 1)
    if not found or (report.first is not None and report.first.step <= found[0].step):
        return
    report.first = _describe_samples(found[0], first)
    # Only rank 0's buffers are saved; the other ranks receive them before they use them.
    began = {key: text for key, text in third.begin.items() if rank == 0 or key[0] != "buffer"}
    expected = {key: text for key, text in first.steps.get(at, {}).items() if key in began}
    report.not_restored = _differences(expected, began, at, rank, ignore) if expected else []


def _describe_samples(difference: Difference, uninterrupted: Recorded) -> Difference:
    """Replace the hashes of samples by the steps in which the uninterrupted run read them."""
    if difference.kind != "samples":
        return difference
    read_in = {
        each: step
        for step, values in uninterrupted.steps.items()
        for each in values["samples", "samples"].split()
    }
    found, expected = difference.found.split(), difference.expected.split()
    known = [read_in[each] for each in found if each in read_in]
    if sorted(found) == sorted(expected):
        text = "the same samples in another order"
    elif not known:
        text = "samples that the uninterrupted run never read, or that were made differently"
    else:
        steps = ", ".join(map(str, sorted({*known})))
        text = f"the uninterrupted run reads {len(known)} of these {len(found)} samples in step {steps}"
    return replace(difference, found=text, expected=f"the {len(expected)} samples of this step")


def _differences(
    expected: Values,
    found: Values,
    step: int,
    rank: int,
    ignore: Iterable[str],
    noise: Iterable[str] = (),
) -> list[Difference]:
    differing = []
    for kind, name in [*expected, *(each for each in found if each not in expected)]:
        first, second = (values.get((kind, name), "nothing") for values in (expected, found))
        if first == second or (kind == "value" and name in noise):
            continue
        if not any(name == each or fnmatchcase(name, each) for each in ignore):
            differing.append(Difference(step, rank, kind, name, second, first))
    return differing
