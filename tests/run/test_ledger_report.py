"""What is read from a ledger: whatever attempts there were, and whatever state the file is in."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import DataError
from drivetrain.run.ledger_report import KINDS, NAME, RunLedger, find_runs, read_ledger

SET_UP, UPDATE, SAVE = 10.0, 2.0, 1.0


class Writer:  # writes a ledger as attempts would: steps of two seconds, saves of one, ten for the set-up
    def __init__(self, directory: Path) -> None:
        self.file = directory / NAME
        self.clock, self.attempt = 1_000_000.0, 0

    def start(self, after: float = 0.0, resumed: int | None = 0) -> Writer:
        """Begin an attempt some time after the last one, and begin to train, except with None."""
        self.clock += after
        self.attempt += 1
        self.steps, self.resumed, self.is_fresh = 0, None, None
        self.spent = dict.fromkeys(("set-up", "data", "compute", "evaluation", "save", "restore"), 0.0)
        self.line("start")
        if resumed is None:
            return self
        self.spend("set-up", SET_UP)
        self.steps = self.resumed = resumed
        self.is_fresh = not resumed
        return self.line("train")

    def spend(self, kind: str, seconds: float) -> Writer:
        self.spent[kind] += seconds
        self.clock += seconds
        return self

    def update(self, count: int = 1) -> Writer:
        self.steps += count
        return self.spend("compute", count * UPDATE)

    def save(self) -> Writer:
        return self.spend("save", SAVE).line("save")

    def line(self, event: str, **more: Any) -> Writer:
        row = {"v": 1, "event": event, "attempt": str(self.attempt), "time": self.clock}
        row |= {"steps": self.steps, "from": self.resumed, "fresh": self.is_fresh, "spent": self.spent}
        with self.file.open("a", encoding="ascii") as file:
            file.write(json.dumps({**row, **more}) + "\n")
        return self

    def end(self, ended: str = "finished") -> Writer:
        return self.line("end", ended=ended)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def spent(ledger: RunLedger) -> Mapping[str, float]:  # what is not nothing, of what adds up
    seconds = ledger.seconds
    assert tuple(seconds) == KINDS
    assert sum(seconds.values()) == pytest.approx(ledger.wall, rel=1e-9)
    return {kind: round(each, 6) for kind, each in seconds.items() if each}


def test_work_after_the_checkpoint_that_is_resumed_is_lost(writer: Writer, tmp_path: Path) -> None:
    writer.start().update(3).save().update(2).spend("data", 0.5).spend("evaluation", 0.25).line("beat")
    found = spent(read_ledger(tmp_path))
    assert found == {"set-up": 10, "compute": 10, "data": 0.5, "evaluation": 0.25, "save": 1}
    writer.start(after=30, resumed=3).update(4).save().end()
    ledger = read_ledger(tmp_path)
    lost = {"lost work": 2 * UPDATE + 0.75, "waiting": 30}
    assert spent(ledger) == {"set-up": 20, "compute": 7 * UPDATE, "save": 2, **lost}
    assert ledger.goodput == 7 * UPDATE / ledger.wall
    assert ledger.steps == 7


def test_a_clock_that_was_set_back_makes_nothing_negative(writer: Writer, tmp_path: Path) -> None:
    writer.start().update(5).end("Preempted")
    writer.start(after=-3600, resumed=5).update(5).end()
    assert spent(read_ledger(tmp_path)) == {"set-up": 20, "compute": 20}


HOSTILE = [
    b"\x00\xff\xfe",
    b"[" * 50_000,
    b'{"v": 2, "event": "beat"}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": NaN, "steps": 1, "spent": {}}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": 1, "steps": 1' + b"0" * 5000 + b"}",
]


def test_lines_that_are_none_of_a_ledger_or_torn_cost_only_themselves(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    whole = writer.file.read_bytes()
    writer.update(3).line("beat")
    line = writer.file.read_bytes()[len(whole) :]
    wrong = []
    # Without its end a line is whole all the same.
    torn = [(line[:1], 1, 0), (line[:20], 1, 0), (line[:-1], 0, 3)]
    for bad, unreadable, steps in [*((each + b"\n" + line, 1, 3) for each in HOSTILE), *torn]:
        writer.file.write_bytes(whole + bad)
        found = read_ledger(tmp_path)
        if (found.unreadable, found.steps) != (unreadable, steps):
            wrong.append((bad[:80], found.unreadable, found.steps))
    assert wrong == []


def test_read_ledger_and_find_runs_take_directories_and_files(writer: Writer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no ledger\.jsonl in .*give the run directory"):
        read_ledger(tmp_path)
    (tmp_path / NAME).write_text("nothing of ours\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"nothing in .* can be read as the ledger of a run"):
        read_ledger(tmp_path)
    (tmp_path / NAME).unlink()
    for each in ("b", "a/first", "a/second"):
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / each / NAME).touch()
    assert find_runs(tmp_path) == [tmp_path / each for each in ("a/first", "a/second", "b")]
    assert find_runs(tmp_path / "b") == find_runs(tmp_path / "b" / NAME) == [tmp_path / "b"]
    writer.start()
    assert read_ledger(tmp_path / NAME) == read_ledger(tmp_path)


def test_reading_a_ledger_does_not_import_torch() -> None:
    program = "import sys, drivetrain.run.ledger_report, drivetrain.cli.runs; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
