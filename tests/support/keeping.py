"""The policies of what a run directory keeps, stated a second time, too simply to be wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.checkpoint import CheckpointConfig


@dataclass(eq=False)
class Saved:
    """A checkpoint as the oracle knows it.

    Attributes:
        name: Of its directory.
        number: Its content: how many were written before it.
        update: The number of updates made before it.
        metrics: The metrics that rank it.
        points: The intervals that it is a resume point of.
        best: The metrics that it is among the best by.
        told: Its purposes and metrics as they were when it was written: all that it can say of itself.
        ours: Whether the run that is going on has saved or loaded it.
        damage: What has happened to it on the disk: to a "tensor", an "object", its "manifest"; or it is
            "gone".
    """

    name: str
    number: int
    update: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    points: frozenset[str] = frozenset()
    best: frozenset[str] = frozenset()
    told: tuple[frozenset[str], frozenset[str], Mapping[str, float]] = (frozenset(), frozenset(), {})
    ours: bool = True
    damage: str | None = None

    def known(self) -> tuple[Any, ...]:
        """What the index has of it."""
        return self.name, self.update, repr(sorted(self.metrics.items())), self.points, self.best


class Oracle:
    """A run directory as a list of checkpoints, oldest first, each with what it is kept for.

    The policies are applied when something is saved. To open the directory under others changes nothing.

    Attributes:
        policies: The policies.
        all: What is there. The last is the newest.
        others: Names of what was set aside, or is no checkpoint any more.
        has_index: Whether there is an index.
        warnings: A piece of each warning that is to be expected.
    """

    def __init__(self) -> None:
        self.policies: tuple[CheckpointConfig, ...] = (CheckpointConfig(),)
        self.all: list[Saved] = []
        self.others: set[str] = set()
        self.has_index = False
        self.warnings: list[str] = []

    # What is best.

    def most(self, by: str) -> int:
        """How many keepers a metric has."""
        return max((each.keepers for each in self.policies if each.by == by), default=0)

    def metrics(self) -> list[str]:
        """The metrics that rank, the first policy's first."""
        return list(dict.fromkeys(each.by for each in self.policies if each.by is not None and each.keepers))

    def is_as_good(self, by: str, value: float, other: float) -> bool:
        """Whether `value` is as good as `other`, or better."""
        mode = next(each.mode for each in self.policies if each.by == by and each.keepers)
        return value <= other if mode == "min" else value >= other

    def is_wanted(self, metrics: Mapping[str, float], by: str) -> bool:
        """Whether fewer keepers than are kept are as good as these metrics."""
        values = [each.metrics[by] for each in self.all if by in each.best]
        if math.isnan(metrics[by]):
            return False
        return sum(self.is_as_good(by, each, metrics[by]) for each in values) < self.most(by)

    def better(self, by: str, saved: Saved) -> int:
        """How many keepers by a metric come before one of them: of equals the earlier is better."""
        value, number = saved.metrics[by], self.all.index(saved)
        count = 0
        for other, each in enumerate(self.all):
            if each is saved or by not in each.best:
                continue
            before, after = (
                self.is_as_good(by, each.metrics[by], value),
                self.is_as_good(by, value, each.metrics[by]),
            )
            count += (before and not after) or (before and other < number)
        return count

    def best_by(self, by: str) -> Saved | None:
        """The best by a metric."""
        return next((each for each in self.all if by in each.best and not self.better(by, each)), None)

    # What a run does.

    def here(self, update: int) -> Saved | None:
        """The checkpoint that the run that is going on already has at an update."""
        return next((each for each in self.all if each.ours and each.update == update), None)

    def save(
        self, saved: Saved, metrics: Mapping[str, float], resume: Collection[str], keeper: Collection[str]
    ) -> None:
        """Note a new checkpoint, or a further purpose of one that is there; then drop what is not kept."""
        known = {each.by: metrics[each.by] for each in self.policies if each.by in metrics and each.by}
        good = frozenset(by for by in keeper if not math.isnan(metrics[by]))
        if saved not in self.all:
            self.all.append(saved)
            saved.told = (frozenset(resume), good, known)
        saved.metrics = {**known, **saved.metrics, **{by: known[by] for by in good}}
        saved.points |= frozenset(resume)
        saved.best |= good
        kept = [(self.kept_points(each), self.kept_best(each)) for each in self.all]
        for each, (points, best) in zip(self.all, kept, strict=True):
            each.points, each.best = points, best
        self.all = [each for each in self.all if each is self.all[-1] or each.points or each.best]
        self.has_index = True

    def kept_points(self, saved: Saved) -> frozenset[str]:
        """The intervals that it stays a resume point of: few enough are newer, for one policy."""
        names = {str(each.every) for each in self.policies if each.every is not None}
        kept = set()
        for number, policy in enumerate(self.policies):

            def own(each: Saved, number: int = number, policy: CheckpointConfig = policy) -> set[str]:
                others = {name for name in each.points if name not in names and number == 0}
                return others | {name for name in each.points if name == str(policy.every)}

            newer = self.all[self.all.index(saved) + 1 :]
            if policy.keep_last is None or sum(bool(own(each)) for each in newer) < policy.keep_last:
                kept |= own(saved)
        return frozenset(kept)

    def kept_best(self, saved: Saved) -> frozenset[str]:
        """The metrics that it stays a keeper by: few enough are better. Of no metric that ranks now: as long
        as there is room by the first that does.
        """
        metrics = self.metrics()
        if not metrics:
            return frozenset()
        if saved.best and not saved.best.intersection(metrics):
            old = [each for each in self.all if each.best and not each.best.intersection(metrics)]
            taken = sum(metrics[0] in each.best for each in self.all)
            return saved.best if taken + old.index(saved) < self.most(metrics[0]) else frozenset()
        return frozenset(by for by in metrics if by in saved.best and self.better(by, saved) < self.most(by))

    def open(self, lost: str | None = None) -> None:
        """A new run opens the directory, whose index may be "gone" or "damaged" since."""
        for each in self.all:
            each.ours = False
        if lost and self.has_index:
            self._rebuild(lost)
            return
        for each in list(self.all):
            if each.damage == "manifest":
                self._set_aside(each.name)
            elif each.damage == "gone":
                self.warnings.append(f"{each.name}' is in the index, but not on the disk")
            if each.damage in ("manifest", "gone"):
                self.all.remove(each)

    def _rebuild(self, lost: str) -> None:
        """Without an index, each checkpoint speaks for itself."""
        if lost == "damaged":
            self._set_aside("index.json")
        for each in list(self.all):
            if each.damage == "manifest":  # nothing tells that this was a checkpoint
                self.others.add(each.name)
            elif each.damage == "object":  # the object that speaks is one
                self._set_aside(each.name)
            if each.damage in ("manifest", "gone", "object"):
                self.all.remove(each)
            each.points, each.best, each.metrics = each.told
        self.has_index = bool(self.all)

    def load_latest(self) -> Saved | None:
        """The newest that is whole; those that are not are set aside on the way."""
        while self.all and self.all[-1].damage:
            self._set_aside(self.all[-1].name)
            self.all.pop()
        if not self.all:
            return None
        self.all[-1].ours = True
        return self.all[-1]

    def _set_aside(self, name: str) -> None:
        """What is damaged gets the first free name that says so, and a warning that names it."""
        aside, number = f"{name}.bad", 1
        while aside in self.others:
            number += 1
            aside = f"{name}.bad-{number}"
        self.others.add(aside)
        self.warnings.append(f"{aside}'")
