"""Compare a resumed run with an uninterrupted one, and name the state that was not saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

from drivetrain.testing.resume.recording import KILLED, RESUMED, UNINTERRUPTED
from drivetrain.testing.resume.rows import Recorded, read

_CANDIDATES = 8
"""The number of unsaved places that the report names."""

_SAMPLES, _LOGGED, _ANY = "data samples", "logged value ", " at update *"
_GENERATORS = ("random.Random at ", "numpy.random.", "torch.Generator at ")

_ADVICE = {
    "task": "A task's state is saved if it is a buffer, or if get_extra_state and set_extra_state handle it."
    " The random numbers of a step are repeated if they come from the global generators, or from a generator"
    " in an attribute of the task or of its modules",
    "callback": "A callback's state is saved if it has state_dict and load_state_dict",
    "train data": "The random numbers of a dataset are repeated if they come from the global generators,"
    " which are seeded for each batch. Its counters are saved if the data has state_dict and load_state_dict",
    "buffer": "A buffer is saved unless it was registered with persistent=False",
    "": "A variable of a module is not saved. Move it to the task or to a callback, and save it there",
}
_NOT_REPRODUCIBLE = (
    "Seed every generator that the program creates (random.Random(0), not random.Random()), and let nothing"
    " depend on the time or on the order of files in a directory"
)
_UNEXPLAINED = (
    "the state of the task, the data, the callbacks and the program's modules does not explain it. Look for"
    " a generator or an iterator in use, a file that is read, os.environ or the time. With num_workers > 0,"
    " look also at the state of the dataset's copies in the workers"
)
_FIRST_EPOCH = (
    "no epoch had ended by the save after update {}, so state that only changes at the end of an epoch was"
    " not tested. Shorten the epochs to test it (--epoch 2, epoch=2)"
)


@dataclass(frozen=True)
class Difference:
    """A value that differs between two runs.

    Attributes:
        update: The update that it belongs to; None for a value from before the first.
        rank: The rank.
        name: The kind and name of the value, such as "parameter net.0.weight".
        found: The text of the value in the second run.
        expected: The text of the value in the first run.
    """

    update: int | None
    rank: int
    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        found, expected = _shorter(self.found), _shorter(self.expected)
        if found == expected:
            return f"{self.name}: {found}, which differs from the expected value further on"
        return f"{self.name}: {found}, expected {expected}"


@dataclass
class Report:
    """The result of a check.

    Attributes:
        updates: The number of compared updates.
        save_after: The update at which the run was resumed.
        ranks: The number of ranks.
        unsaved: State that was not saved, the most likely cause first.
        first: The first difference in the computed values of the resumed run; None if they agree.
        later: The number of differences after the first.
        not_reproducible: The first difference between the uninterrupted and the killed run before the save.
            The resumed run is not compared if there is one.
        causes: The differences in the program's state before `not_reproducible`.
        left_out: Names of logged values that were not compared because they differ between any two runs.
        in_first_epoch: Whether no epoch had ended when the run was saved.
    """

    updates: int
    save_after: int
    ranks: int
    unsaved: list[Difference] = field(default_factory=list)
    first: Difference | None = None
    later: int = 0
    not_reproducible: Difference | None = None
    causes: list[Difference] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    in_first_epoch: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the resumed run equals the uninterrupted one, and all state was saved."""
        return self.not_reproducible is None and self.first is None and not self.unsaved

    def __str__(self) -> str:
        """Return the report as lines of text."""
        where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        begun = f"{self.updates} updates{where}, killed, resumed at update {self.save_after}"
        if self.not_reproducible is not None:
            lines = self._not_reproducible_lines()
        elif self.is_good:
            lines = [f"{begun}: the runs are identical to the last bit"]
            if self.in_first_epoch:
                lines.append(_FIRST_EPOCH.format(self.save_after))
        else:
            lines = [f"{begun}: the run differs from the uninterrupted one"]
            lines += self._first_lines()
            lines += self._unsaved_lines()
        if self.left_out:
            lines.append(f"not compared, since any two runs log different values: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _not_reproducible_lines(self) -> list[str]:
        assert self.not_reproducible is not None
        lines = [
            "two runs from the start already differ, so resuming cannot be checked",
            f"first difference, {_when(self.not_reproducible, self.ranks)}: {self.not_reproducible}",
            *(f"state that differed before: {each}" for each in self.causes[:_CANDIDATES]),
            _NOT_REPRODUCIBLE,
        ]
        if not self.causes:
            lines.append("deterministic=True selects kernels that add in the same order each time")
        return lines

    def _first_lines(self) -> list[str]:
        if self.first is None:
            return ["the computed values agree so far, but some state was not restored"]
        more = f"; {self.later} more values differ after it" if self.later else ""
        return [f"first difference, {_when(self.first, self.ranks)}: {self.first}{more}"]

    def _unsaved_lines(self) -> list[str]:
        if not self.unsaved:
            return [_UNEXPLAINED]
        lines = [f"not saved: {each}" for each in self.unsaved[:_CANDIDATES]]
        if len(self.unsaved) > _CANDIDATES:
            lines.append(f"and {len(self.unsaved) - _CANDIDATES} more places")
        root = self.unsaved[0].name
        lines.append(next(text for begin, text in _ADVICE.items() if root.startswith(begin)))
        return lines


def _when(difference: Difference, ranks: int) -> str:
    where = f" on rank {difference.rank}" if ranks > 1 else ""
    return f"after update {difference.update}{where}"


def _shorter(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:80]}..."


def compare(directory: Path, ignore: Sequence[str] = ()) -> Report:
    """Compare the records of the three runs.

    Args:
        directory: The directory of the records.
        ignore: Patterns of names that may differ, such as "callback History.*".
    """
    uninterrupted, killed, resumed = (read(directory, kind) for kind in (UNINTERRUPTED, KILLED, RESUMED))
    began = resumed[0].start
    assert began is not None
    report = Report(len(uninterrupted[0].updates), began["update"], len(uninterrupted))
    report.in_first_epoch = _is_first_epoch(uninterrupted[0], report.save_after)
    noise: set[str] = set()
    for rank, (first, second) in enumerate(zip(uninterrupted, killed, strict=True)):
        _compare_starts(report, rank, first, second, ignore, noise)
    if report.not_reproducible is not None:
        return report
    for rank, (first, third) in enumerate(zip(uninterrupted, resumed, strict=True)):
        _compare_resumed(report, rank, first, third, [*ignore, *noise])
    for rank, (first, second, third) in enumerate(zip(uninterrupted, killed, resumed, strict=True)):
        _find_unsaved(report, rank, (first, second, third), ignore)
    unequal = {each.removeprefix(_LOGGED).removesuffix(_ANY) for each in noise}
    report.left_out = sorted(unequal.union(*(each.timed for each in uninterrupted)))
    return report


def _is_first_epoch(uninterrupted: Recorded, save_after: int) -> bool:
    """Return whether the first update after the save belongs to the epoch in which the run began."""
    if save_after + 1 not in uninterrupted.updates:
        return False
    first, following = uninterrupted.items(min(uninterrupted.updates)), uninterrupted.items(save_after + 1)
    return first["data epoch"] == following["data epoch"]


def _compare_starts(
    report: Report, rank: int, first: Recorded, second: Recorded, ignore: Sequence[str], noise: set[str]
) -> None:
    """Compare two runs before the kill. A logged value that differs is left out: it may be a time."""
    before: Mapping[str, Any] = first.start or {"program state": {}}
    other: Mapping[str, Any] = second.start or {"program state": {}}
    for update in sorted(set(first.updates) & set(second.updates)):
        for each in _differences(first.items(update), second.items(update), update, rank, ignore):
            if each.name.startswith(_LOGGED):
                noise.add(f"{each.name.rpartition(' at update ')[0]}{_ANY}")
            elif report.not_reproducible is None or (report.not_reproducible.update or 0) > update:
                report.not_reproducible = each
                report.causes = list(
                    _differences(before["program state"], other["program state"], None, rank, ignore)
                )
        before, other = first.updates[update], second.updates[update]


def _compare_resumed(
    report: Report, rank: int, first: Recorded, third: Recorded, ignore: Sequence[str]
) -> None:
    found: list[Difference] = []
    for update in sorted(each for each in first.updates if each > report.save_after):
        if update not in third.updates:
            found.append(Difference(update, rank, "update", "missing", "made"))
            break
        expected = _later_only(first.items(update), report.save_after)
        other = _later_only(third.items(update), report.save_after)
        found += _differences(expected, other, update, rank, ignore)
    last = max(first.updates, default=0)
    expected = _later_only(first.items(last, after_end=True), report.save_after)
    other = _later_only(third.items(last, after_end=True), report.save_after)
    found += _differences(expected, other, last, rank, ignore)
    if found and (report.first is None or (report.first.update or 0) > (found[0].update or 0)):
        report.first = _describe_samples(found[0], first)
    report.later = max(report.later, len(found) - 1)


def _describe_samples(difference: Difference, uninterrupted: Recorded) -> Difference:
    """Replace the hashes of samples by the updates in which the uninterrupted run read them."""
    if not difference.name.startswith(_SAMPLES):
        return difference
    read_in: dict[str, int] = {}
    for update in uninterrupted.updates:
        for name, text in uninterrupted.items(update).items():
            if name.startswith(_SAMPLES):
                read_in.update(dict.fromkeys(text.split(), update))
    found, expected = difference.found.split(), difference.expected.split()
    if sorted(found) == sorted(expected):
        text = "the same samples in another order"
    elif not set(found) & set(read_in):
        text = "samples that the uninterrupted run never read, or that were made differently"
    else:
        updates = ", ".join(map(str, sorted({read_in[each] for each in found if each in read_in})))
        text = f"{len(found)} samples, which the uninterrupted run reads in update {updates}"
    return dataclasses.replace(difference, found=text, expected=f"the {len(expected)} samples of this update")


def _later_only(items: Mapping[str, str], save_after: int) -> dict[str, str]:
    """Drop the values logged up to the save: the resumed run does not log them again."""
    return {name: text for name, text in items.items() if _logged_at(name) > save_after}


def _logged_at(name: str) -> int:
    return int(name.rpartition(" at update ")[2]) if name.startswith(_LOGGED) else 1 << 62


def _find_unsaved(
    report: Report, rank: int, runs: tuple[Recorded, Recorded, Recorded], ignore: Sequence[str]
) -> None:
    """Find the state of the program's objects that was there at the save and missing after the resume."""
    uninterrupted, killed, resumed = runs
    at = report.save_after
    if at not in uninterrupted.updates or resumed.start is None or uninterrupted.start is None:
        return
    began, then = uninterrupted.start["program state"], uninterrupted.updates[at]["program state"]
    same = killed.updates[at]["program state"] if at in killed.updates else then
    found = resumed.start["program state"]
    lasting = _not_restored(uninterrupted, resumed, at, rank, ignore)
    kept: list[Difference] = []
    rebuilt: list[Difference] = []
    for each in _differences(then, found, at, rank, ignore):
        if same.get(each.name) != then.get(each.name):  # a time, or an address
            continue
        if each.found.startswith(_GENERATORS) and began.get(each.name) == each.found:
            each = dataclasses.replace(each, found="as in a new process")
        if not _agrees_after_an_update(each.name, uninterrupted, resumed, at):
            lasting.append(each)
        else:
            (rebuilt if _is_rebuilt(each.name, runs, at) else kept).append(each)
    lasting.sort(
        key=lambda each: not (each.expected.startswith(_GENERATORS) or each.name.startswith("buffer "))
    )
    known = {each.name for each in report.unsaved}
    # State that is rebuilt counts as unsaved only if the computed values differ.
    unsaved = [*lasting, *kept, *(rebuilt if report.first is not None else ())]
    report.unsaved += [each for each in unsaved if each.name not in known]


def _agrees_after_an_update(name: str, uninterrupted: Recorded, resumed: Recorded, at: int) -> bool:
    """Return whether a place holds the same in both runs after the first update that follows the save."""
    following, again = (
        {} if at + 1 not in each.updates else each.program_state(at + 1) for each in (uninterrupted, resumed)
    )
    return name in following and following[name] == again.get(name)


def _is_rebuilt(name: str, runs: tuple[Recorded, Recorded, Recorded], at: int) -> bool:
    """Return whether every run rebuilds this state before using it, so that it need not be saved.

    State can also agree by chance, for instance if an evaluation right after the save sets it again. That
    state is unsaved: after another save it would stay wrong for longer.
    """
    uninterrupted, killed, resumed = runs
    assert uninterrupted.start is not None
    began, again = ({} if each.next is None else each.next["program state"] for each in (killed, resumed))
    if name in began and began[name] == again.get(name):
        return True  # rebuilt as the fit or an epoch begins, or as a batch is read
    texts = [
        uninterrupted.start["program state"].get(name),
        *(uninterrupted.program_state(each).get(name) for each in uninterrupted.updates),
    ]
    changes = [first != second for first, second in pairwise(texts)]
    if sum(changes) > len(changes) / 2:
        return True  # rebuilt in each update; a small number or a bool may keep its value
    # A cache: filled by the first update of a run, with the same value as before.
    return changes[0] and uninterrupted.program_state(at).get(name) == resumed.program_state(at + 1).get(name)


def _not_restored(
    uninterrupted: Recorded, resumed: Recorded, at: int, rank: int, ignore: Sequence[str]
) -> list[Difference]:
    """Return the weights, buffers, optimizer states and rates that the resumed run did not restore."""
    assert resumed.start is not None
    began = {f"{part} {name}": text for part, name, text in resumed.start["items"]}
    # Only rank 0's buffers are saved; the other ranks receive them before they use them.
    began = {name: text for name, text in began.items() if rank == 0 or not name.startswith("buffer ")}
    expected = uninterrupted.items(at)
    return _differences({name: expected.get(name, "nothing") for name in began}, began, at, rank, ignore)


def _differences(
    expected: Mapping[str, str],
    found: Mapping[str, str],
    update: int | None,
    rank: int,
    ignore: Iterable[str],
) -> list[Difference]:
    differing = []
    for name in [*expected, *(each for each in found if each not in expected)]:
        first, second = expected.get(name, "nothing"), found.get(name, "nothing")
        if first != second and not any(name == each or fnmatch(name, each) for each in ignore):
            differing.append(Difference(update, rank, name, second, first))
    return differing
