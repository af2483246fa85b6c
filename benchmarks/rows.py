"""The rows of the tables in which contestants train, evaluate and predict in turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workloads import GPT_10M, SMALL_CNN, TINY, WARM_UP, Job, Work, deep

UPDATE = "A step"
GROWTH = "What grows"
EVALUATION = "Evaluation and prediction, a batch"
MODELS = "Models"


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        table: Which table it is in.
        name: What it measures.
        work: What is trained.
        verb: "train", "evaluate" or "predict".
        wishes: Fields of the `Job` that are not as bare as can be.
        needs: What a contestant must not lack for it.
        added: The most microseconds that ours may add; None where there is no such goal.
        ratio: The most times the hand-written loop's step that ours may take; None where there is no such
            goal.
        steps: How many are timed in each turn; None for as many as the command line says.
        block: Over how many the time is taken together.
        warm_up: How many come before.
    """

    table: str
    name: str
    work: Work = TINY
    verb: str = "train"
    wishes: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    added: float | None = None
    ratio: float | None = None
    steps: int | None = None
    block: int = 50
    warm_up: int = WARM_UP

    @property
    def goal(self) -> str:
        """In words."""
        if self.added is not None:
            return f"+{self.added:g} us"
        return "" if self.ratio is None else f"{self.ratio:g}"

    def job(self, steps: int, directory: Path, **more: Any) -> Job:
        """What each contestant is given.

        Args:
            steps: How many are timed, where the row does not say.
            directory: For files.
            more: Other fields.
        """
        count = self.steps or steps
        fields = {"steps": count, "block": min(self.block, count), "warm_up": self.warm_up}
        return Job(self.work, directory=directory, **{**fields, **self.wishes, **more})


def _step(name: str, added: float | None, *needs: str, **wishes: Any) -> Row:
    return Row(UPDATE, name, wishes=wishes, needs=needs, added=added)


def _growth(name: str, added: float | None, *needs: str, **wishes: Any) -> Row:
    return Row(GROWTH, name, wishes=wishes, needs=needs, added=added)


def _model(work: Work, steps: int, block: int) -> Row:
    return Row(MODELS, work.name, work, ratio=1.01, steps=steps, block=block, warm_up=3)


ON = {"accuracy": True, "everything": True}

ROWS = [
    _step("in memory, bare", 10),
    _step("DataLoader, bare", 10, loader=True),
    _step("in memory, everything on", 35, "everything", **ON),
    _step("DataLoader, everything on", 35, "everything", loader=True, **ON),
    _step("clipping", 10, "clip", clip=1.0),
    _step("accumulation 4", None, "accumulation", accumulation=4),
    _step("clipping, accumulation 4", None, "clip", "accumulation", clip=1.0, accumulation=4),
    _growth("1 returned metric", None, "returned", returned=1),
    _growth("10 returned metrics", None, "returned", returned=10),
    _growth("100 returned metrics", 60, "returned", returned=100),
    _growth("10 idle callbacks", 12, "callbacks", callbacks=10),
    _growth("50 idle callbacks", 12, "callbacks", callbacks=50),
    _growth("10 callbacks, two empty hooks each", None, "hooks", callbacks=10, hooks=True),
    _growth("50 callbacks, two empty hooks each", None, "hooks", callbacks=50, hooks=True),
    Row(GROWTH, "20 parameters", deep(10), added=10),
    Row(GROWTH, "200 parameters", deep(100), steps=150),
    Row(EVALUATION, "evaluation", verb="evaluate", needs=("evaluate",), added=5),
    Row(EVALUATION, "prediction", verb="predict", needs=("predict",)),
    _model(GPT_10M, 10, 5),
    _model(SMALL_CNN, 60, 20),
]

BY_NAME = {row.name: row for row in ROWS}
