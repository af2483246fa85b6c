"""Progress: what it counts survives a file, and a wrong file changes nothing."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from drivetrain.core.errors import CheckpointError
from drivetrain.core.progress import Progress

COUNTED = Progress(7, 21, 84, 4_000_000_000_000, 2, 3, 9, 36, 1, 12.345678901234567)


def test_progress_comes_back_from_json_as_it_was() -> None:
    restored = Progress(updates=99)
    restored.load_json(json.loads(json.dumps(COUNTED.to_json())))
    assert restored == COUNTED
    assert all(type(getattr(restored, f.name)) is type(getattr(COUNTED, f.name)) for f in fields(Progress))


def test_a_fresh_progress_stands_at_zero() -> None:
    assert set(Progress().to_json().values()) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": None}, "updates=None"),
        ({"updates": "7"}, "updates='7'"),
        ({"updates": True}, "updates=True"),
        ({"updates": 7.5}, r"updates=7\.5"),
        ({"position": -1}, "position=-1"),
        ({"seconds": -0.5}, r"seconds=-0\.5"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"seconds": float("inf")}, "seconds=inf"),
        ({"steps": 3}, "does not fit: steps"),
    ],
)
def test_counts_that_cannot_be_are_refused_and_nothing_is_taken_over(
    change: dict[str, Any], message: str
) -> None:
    progress = Progress()
    with pytest.raises(CheckpointError, match=message):
        progress.load_json({**COUNTED.to_json(), **change})
    assert progress == Progress()


def test_a_missing_count_is_named() -> None:
    state = COUNTED.to_json()
    del state["tokens"]
    with pytest.raises(CheckpointError, match="does not fit: tokens"):
        Progress().load_json(state)


def test_bad_batches_were_not_counted_at_first() -> None:
    state = COUNTED.to_json()
    del state["bad_batches"]
    progress = Progress(bad_batches=3)
    progress.load_json(state)
    assert progress == COUNTED


def test_a_misspelt_count_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        Progress().step = 3  # type: ignore[attr-defined]
