"""The policy of what a run directory keeps, stated a second time, too simply to be wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.checkpoint import CheckpointConfig


@dataclass(eq=False)
class Saved:
    """A checkpoint as the oracle knows it.

    Attributes:
        name: Of its directory.
        number: Its content: how many were written before it.
        update: The number of updates made before it.
        metrics: The metric that ranks it.
        told: Both purposes and the metrics as they were when it was written: all that it can say of itself.
        ours: Whether the run that is going on has saved or loaded it.
        damage: What has happened to it on the disk: to a "tensor", an "object", its "manifest"; or it is
            "gone".
    """

    name: str
    number: int
    update: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    told: tuple[bool, bool, Mapping[str, float]] = (False, False, {})
    ours: bool = True
    damage: str | None = None


class Oracle:
    """A run directory as three lists, each oldest first: all checkpoints, the resume points, the keepers.

    The policy is applied when something is saved. To open the directory under another one changes nothing.

    Attributes:
        config: The policy.
        all: What is there. The last is the newest.
        points: Those that are resume points.
        keepers: Those that are among the best.
        others: Names of what was set aside, or is no checkpoint any more.
        has_index: Whether there is an index.
        warnings: A piece of each warning that is to be expected.
    """

    def __init__(self) -> None:
        self.config = CheckpointConfig()
        self.all: list[Saved] = []
        self.points: list[Saved] = []
        self.keepers: list[Saved] = []
        self.others: set[str] = set()
        self.has_index = False
        self.warnings: list[str] = []

    def purposes(self, saved: Saved) -> tuple[bool, bool]:
        """Whether it is a resume point, and whether it is a keeper."""
        return saved in self.points, saved in self.keepers

    # What is best.

    def is_as_good(self, value: float, other: float) -> bool:
        """Whether `value` is as good as `other`, or better."""
        return value <= other if self.config.mode == "min" else value >= other

    def is_wanted(self, metrics: Mapping[str, float]) -> bool:
        """Whether fewer keepers than are kept are as good as these metrics."""
        by = self.config.by or ""
        values = [each.metrics[by] for each in self.keepers if by in each.metrics]
        if by not in metrics or math.isnan(metrics[by]):
            return False
        return sum(self.is_as_good(each, metrics[by]) for each in values) < self.config.keepers

    def ranking(self) -> list[Saved]:
        """The keepers, best first: of equals the earlier, and those without the metric at the end."""
        by = self.config.by or ""
        left = list(self.keepers)
        ranked = []
        while left:
            first = left[0]
            for each in left:
                if by in each.metrics and not (
                    by in first.metrics and self.is_as_good(first.metrics[by], each.metrics[by])
                ):
                    first = each
            left.remove(first)
            ranked.append(first)
        return ranked

    # What a run does.

    def here(self, update: int) -> Saved | None:
        """The checkpoint that the run that is going on already has at an update."""
        return next((each for each in self.all if each.ours and each.update == update), None)

    def save(self, saved: Saved, metrics: Mapping[str, float], resume: bool, keeper: bool) -> None:
        """Note a new checkpoint, or a further purpose of one that is there; then drop what is not kept."""
        by = self.config.by
        keeper = keeper and self.config.keepers > 0 and not math.isnan(metrics[by or ""])
        known = {by: metrics[by]} if by is not None and by in metrics else {}
        if saved not in self.all:
            self.all.append(saved)
            saved.told = (resume, keeper, known)
        if keeper or not saved.metrics:
            saved.metrics = known
        self.points = [each for each in self.all if each in self.points or (resume and each is saved)]
        self.keepers = [each for each in self.all if each in self.keepers or (keeper and each is saved)]
        while len(self.points) > self.config.keep_last:
            del self.points[0]
        while len(self.keepers) > self.config.keepers:
            self.keepers.remove(self.ranking()[-1])
        for each in self.all[:-1]:  # the newest stays in any case
            if each not in self.points and each not in self.keepers:
                self.all.remove(each)
        self.has_index = True

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
                self._forget(each)

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
                self._forget(each)
            each.metrics = each.told[2]
        self.points = [each for each in self.all if each.told[0]]
        self.keepers = [each for each in self.all if each.told[1]]
        self.has_index = bool(self.all)

    def load_latest(self) -> Saved | None:
        """The newest that is whole; those that are not are set aside on the way."""
        while self.all and self.all[-1].damage:
            self._set_aside(self.all[-1].name)
            self._forget(self.all[-1])
        if not self.all:
            return None
        self.all[-1].ours = True
        return self.all[-1]

    def _forget(self, saved: Saved) -> None:
        for each in (self.all, self.points, self.keepers):
            if saved in each:
                each.remove(saved)

    def _set_aside(self, name: str) -> None:
        """What is damaged gets the first free name that says so, and a warning that names it."""
        aside, number = f"{name}.bad", 1
        while aside in self.others:
            number += 1
            aside = f"{name}.bad-{number}"
        self.others.add(aside)
        self.warnings.append(f"{aside}'")
