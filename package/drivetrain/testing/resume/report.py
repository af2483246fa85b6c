"""Compares a run that was killed and resumed with one that was not, and names what was not saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

from drivetrain.testing.resume.recording import KILLED, RESUMED, STRAIGHT
from drivetrain.testing.resume.rows import Recorded, read

_CANDIDATES = 8
"""So many places that were not saved are named."""

_SAMPLES, _LOGGED, _ANY = "data samples", "logged value ", " at update *"
_GENERATORS = ("random.Random at ", "numpy.random.", "torch.Generator at ")

_ADVICE = {
    "task": "A task's own state is saved if it is a buffer, or comes through get_extra_state and"
    " set_extra_state; what a step draws is repeated if it comes from the global generators",
    "callback": "A callback's state is saved if it has state_dict and load_state_dict",
    "train data": "What a dataset draws is repeated if it comes from the global generators, which are seeded"
    " for each batch; what it counts is saved if the data given to fit has state_dict and load_state_dict",
    "buffer": "A buffer is saved unless it was registered with persistent=False",
    "": "What a module of the program holds is saved if the task or a callback saves it as its own",
}
_UNLIKE = (
    "Seed every generator that the program makes, random.Random(0) in place of random.Random(), and let"
    " nothing depend on the time, or on the order of a directory"
)
_UNEXPLAINED = (
    "nothing that the task, the data, the callbacks and the program's modules hold explains it: look for a"
    " generator or an iterator in use, a file that is read, os.environ, the time and, with num_workers > 0,"
    " what the dataset's copies in the workers hold"
)
_FIRST_EPOCH = (
    "no epoch had ended by the save after update {}: what only changes where one ends, as in on_epoch_end,"
    " was not yet to be saved; with shorter epochs it is (--epoch 2, epoch=2)"
)


@dataclass(frozen=True)
class Difference:
    """Something that is not the same in two runs.

    Attributes:
        update: After which update; None for what is no update's.
        rank: On which rank.
        name: What it is: "parameter net.0.weight".
        found: What it was in the second run, and `expected` in the first.
        expected: See `found`.
    """

    update: int | None
    rank: int
    name: str
    found: str
    expected: str

    def __str__(self) -> str:
        found, expected = _shorter(self.found), _shorter(self.expected)
        values = f"{found} in place of {expected}" if found != expected else "other bits of it"
        return f"{self.name}: {values}"


@dataclass
class Report:
    """What came of it.

    Attributes:
        updates: How many updates were compared.
        save_after: After which one the run was resumed.
        ranks: On how many ranks.
        unsaved: Places that were not saved, in the order in which they are to be looked at.
        first: The first difference of the resumed run in what it computed; None if there is none.
        later: How many more things differ from there on.
        unlike: The first difference between two runs from the start, of which nothing can be learned.
        causes: What the program's objects held differently before it.
        left_out: What was not compared, since it differs between any two runs.
        in_first_epoch: Whether no epoch had ended when the run was saved.
    """

    updates: int
    save_after: int
    ranks: int
    unsaved: list[Difference] = field(default_factory=list)
    first: Difference | None = None
    later: int = 0
    unlike: Difference | None = None
    causes: list[Difference] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    in_first_epoch: bool = False

    @property
    def is_good(self) -> bool:
        """Whether the resumed run was the straight one, and nothing of the program's was forgotten."""
        return self.unlike is None and self.first is None and not self.unsaved

    def __str__(self) -> str:
        """As lines for a person."""
        where = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        begun = f"{self.updates} updates{where}, killed, resumed at update {self.save_after}"
        if self.unlike is not None:
            lines = self._unlike_lines()
        elif self.is_good:
            lines = [f"{begun}: all that was compared is the same, to the last bit"]
            if self.in_first_epoch:
                lines.append(_FIRST_EPOCH.format(self.save_after))
        else:
            lines = [f"{begun}: not the straight run"]
            lines += self._first_lines()
            lines += self._unsaved_lines()
        if self.left_out:
            lines.append(f"logged, and not the same in any two runs: {', '.join(self.left_out)}")
        return "\n".join(lines)

    def _unlike_lines(self) -> list[str]:
        assert self.unlike is not None
        lines = [
            "two runs from the start are not alike, so that nothing can be said of a resumed one",
            f"first difference, {_when(self.unlike, self.ranks)}: {self.unlike}",
            *(f"differed before: {each}" for each in self.causes[:_CANDIDATES]),
            _UNLIKE,
        ]
        if not self.causes:
            lines.append("deterministic=True insists on kernels that add in the same order each time")
        return lines

    def _first_lines(self) -> list[str]:
        if self.first is None:
            return ["what it computed is the same so far; what it holds is not"]
        more = f"; {self.later} more things differ after it" if self.later else ""
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
    """Compare what was written down of the three runs.

    Args:
        directory: Of the recordings.
        ignore: Patterns of names that may differ, such as "callback History.*".
    """
    straight, killed, resumed = (read(directory, kind) for kind in (STRAIGHT, KILLED, RESUMED))
    began = resumed[0].start
    assert began is not None
    report = Report(len(straight[0].updates), began["update"], len(straight))
    report.in_first_epoch = _is_first_epoch(straight[0], report.save_after)
    noise: set[str] = set()
    for rank, (first, second) in enumerate(zip(straight, killed, strict=True)):
        _compare_starts(report, rank, first, second, ignore, noise)
    if report.unlike is not None:
        return report
    for rank, (first, third) in enumerate(zip(straight, resumed, strict=True)):
        _compare_resumed(report, rank, first, third, [*ignore, *noise])
    for rank, (first, second, third) in enumerate(zip(straight, killed, resumed, strict=True)):
        _find_unsaved(report, rank, (first, second, third), ignore)
    unlike = {each.removeprefix(_LOGGED).removesuffix(_ANY) for each in noise}
    report.left_out = sorted(unlike.union(*(each.timed for each in straight)))
    return report


def _is_first_epoch(straight: Recorded, save_after: int) -> bool:
    """Whether the first update after the save is of the epoch in which the run began."""
    if save_after + 1 not in straight.updates:
        return False
    first, following = straight.items(min(straight.updates)), straight.items(save_after + 1)
    return first["data epoch"] == following["data epoch"]


def _compare_starts(
    report: Report, rank: int, first: Recorded, second: Recorded, ignore: Sequence[str], noise: set[str]
) -> None:
    """Two runs from the start; what is logged may be a time, and is then left out."""
    before: Mapping[str, Any] = first.start or {"held": {}}
    other: Mapping[str, Any] = second.start or {"held": {}}
    for update in sorted(set(first.updates) & set(second.updates)):
        for each in _differences(first.items(update), second.items(update), update, rank, ignore):
            if each.name.startswith(_LOGGED):
                noise.add(f"{each.name.rpartition(' at update ')[0]}{_ANY}")
            elif report.unlike is None or (report.unlike.update or 0) > update:
                report.unlike = each
                report.causes = list(_differences(before["held"], other["held"], None, rank, ignore))
        before, other = first.updates[update], second.updates[update]


def _compare_resumed(
    report: Report, rank: int, first: Recorded, third: Recorded, ignore: Sequence[str]
) -> None:
    found: list[Difference] = []
    for update in sorted(each for each in first.updates if each > report.save_after):
        if update not in third.updates:
            found.append(Difference(update, rank, "update", "never made", "made"))
            break
        expected = _later_only(first.items(update), report.save_after)
        other = _later_only(third.items(update), report.save_after)
        found += _differences(expected, other, update, rank, ignore)
    last = max(first.updates, default=0)
    expected = _later_only(first.items(last, after_end=True), report.save_after)
    other = _later_only(third.items(last, after_end=True), report.save_after)
    found += _differences(expected, other, last, rank, ignore)
    if found and (report.first is None or (report.first.update or 0) > (found[0].update or 0)):
        report.first = _told(found[0], first)
    report.later = max(report.later, len(found) - 1)


def _told(difference: Difference, straight: Recorded) -> Difference:
    """A difference of samples, in words: where the straight run had read them."""
    if not difference.name.startswith(_SAMPLES):
        return difference
    homes: dict[str, int] = {}
    for update in straight.updates:
        for name, text in straight.items(update).items():
            if name.startswith(_SAMPLES):
                homes.update(dict.fromkeys(text.split(), update))
    found, expected = difference.found.split(), difference.expected.split()
    if sorted(found) == sorted(expected):
        text = "the same samples in another order"
    elif not set(found) & set(homes):
        text = "samples that the straight run has not read: other ones, or otherwise made"
    else:
        updates = ", ".join(map(str, sorted({homes[each] for each in found if each in homes})))
        text = f"{len(found)} samples, which the straight run reads in update {updates}"
    return dataclasses.replace(difference, found=text, expected=f"its {len(expected)}")


def _later_only(items: Mapping[str, str], save_after: int) -> dict[str, str]:
    """What was logged after the save; before it a resumed run logs nothing."""
    return {name: text for name, text in items.items() if _logged_at(name) > save_after}


def _logged_at(name: str) -> int:
    return int(name.rpartition(" at update ")[2]) if name.startswith(_LOGGED) else 1 << 62


def _find_unsaved(
    report: Report, rank: int, runs: tuple[Recorded, Recorded, Recorded], ignore: Sequence[str]
) -> None:
    """What the program's objects held when it was saved, and did not hold when it was resumed."""
    straight, killed, resumed = runs
    at = report.save_after
    if at not in straight.updates or resumed.start is None or straight.start is None:
        return
    began, then = straight.start["held"], straight.updates[at]["held"]
    same = killed.updates[at]["held"] if at in killed.updates else then
    found = resumed.start["held"]
    lasting = _not_restored(straight, resumed, at, rank, ignore)
    kept: list[Difference] = []
    made_anew: list[Difference] = []
    for each in _differences(then, found, at, rank, ignore):
        if same.get(each.name) != then.get(each.name):  # a time, or an address
            continue
        if each.found.startswith(_GENERATORS) and began.get(each.name) == each.found:
            each = dataclasses.replace(each, found="as in a new program")
        if not _heals(each.name, straight, resumed, at):
            lasting.append(each)
        else:
            (made_anew if _is_made_anew(each.name, runs, at) else kept).append(each)
    lasting.sort(
        key=lambda each: not (each.expected.startswith(_GENERATORS) or each.name.startswith("buffer "))
    )
    known = {each.name for each in report.unsaved}
    # What is made anew was not missed, unless something else shows that it was.
    told = [*lasting, *kept, *(made_anew if report.first is not None else ())]
    report.unsaved += [each for each in told if each.name not in known]


def _heals(name: str, straight: Recorded, resumed: Recorded, at: int) -> bool:
    """Whether a place holds the same in both runs once the first update after the save is over."""
    following, again = (
        {} if at + 1 not in each.updates else each.held(at + 1) for each in (straight, resumed)
    )
    return name in following and following[name] == again.get(name)


def _is_made_anew(name: str, runs: tuple[Recorded, Recorded, Recorded], at: int) -> bool:
    """Whether a place that heals is one that every run fills before it is used, so that no save is asked for.

    What an evaluation leaves, for instance, may heal by chance: one came right after the save. It was wrong
    until then, and would be for longer after another save.
    """
    straight, killed, resumed = runs
    assert straight.start is not None
    began, again = ({} if each.next is None else each.next["held"] for each in (killed, resumed))
    if name in began and began[name] == again.get(name):
        return True  # by the beginning of the fit or of an epoch, or by the reading of a batch
    texts = [straight.start["held"].get(name), *(straight.held(each).get(name) for each in straight.updates)]
    changes = [first != second for first, second in pairwise(texts)]
    if sum(changes) > len(changes) / 2:
        return True  # in each update; what is a small number or a bool may be the same again
    # As a cache is: by the first update of a run, and to what it was.
    return changes[0] and straight.held(at).get(name) == resumed.held(at + 1).get(name)


def _not_restored(
    straight: Recorded, resumed: Recorded, at: int, rank: int, ignore: Sequence[str]
) -> list[Difference]:
    """Weights, buffers, moments and rates with which the resumed run did not begin as it should."""
    assert resumed.start is not None
    began = {f"{part} {name}": text for part, name, text in resumed.start["items"]}
    # Those of rank 0 are the run's; others get them before they are used.
    began = {name: text for name, text in began.items() if rank == 0 or not name.startswith("buffer ")}
    expected = straight.items(at)
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
