"""A user's task with an argument of every type, and a callback."""

# ruff: noqa: B006, B008, UP045
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from drivetrain import Callback, TaskModule


@dataclass
class Policy:
    every: int = 1
    best: int = 1


class Typed(TaskModule):
    """A task.

    Args:
        whole: A whole number, of 100 % or less.
    """

    def __init__(
        self, whole: int = 0, number: float = 0.0, flag: bool = False, text: str = "", maybe: int | None = 1,
        either: int | str = 0, kind: Literal["relu", "tanh"] = "relu", sizes: list[int] = [],
        pair: tuple[float, float] = (0.0, 0.0), options: Optional[dict[str, Any]] = None,
        policy: Policy = Policy(), path: Path | None = None, rate=0.5,
    ):  # fmt: skip
        super().__init__()
        self.given = dict(vars())


class Bare(TaskModule):
    def __init__(
        self, kernel=(3, 3), widths=[64, 64], rates=[0.1], names=["a"], sizes={"a": 1, "b": 2},
        by_epoch={0: 8}, title="x", whole=1, none=None, nothing=None, other=None,
        policy: Policy = Policy(every=5),
    ):  # fmt: skip
        super().__init__()
        self.given = dict(vars())


class InheritingBare(Bare):
    def __init__(self, extra=[1], **rest):
        super().__init__(**rest)


class Inheriting(Typed):
    def __init__(self, extra: int = 1, **rest):
        super().__init__(**rest)


class Loud(Callback):
    def on_fit_start(self, run):
        pass
