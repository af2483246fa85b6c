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

SET_UP = 10.0
UPDATE = 2.0
SAVE = 1.0


class Writer:
    """Writes a ledger as attempts would: updates of two seconds, saves of one, ten for the set-up."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / NAME
        self.clock = 1_000_000.0
        self.attempt = 0

    def start(self, after: float = 0.0) -> None:
        self.clock += after
        self.attempt += 1
        self.updates = 0
        self.resumed: int | None = None
        self.is_fresh: bool | None = None
        self.spent = dict.fromkeys(("set-up", "data", "compute", "evaluation", "save", "restore"), 0.0)
        self.line("start")

    def train(self, resumed: int = 0) -> None:
        self.spend("set-up", SET_UP)
        self.updates = self.resumed = resumed
        self.is_fresh = not resumed
        self.line("train")

    def spend(self, kind: str, seconds: float) -> None:
        self.spent[kind] += seconds
        self.clock += seconds

    def update(self, count: int = 1) -> None:
        for _ in range(count):
            self.spend("compute", UPDATE)
            self.updates += 1

    def save(self) -> None:
        self.spend("save", SAVE)
        self.line("save")

    def line(self, event: str, **more: Any) -> None:
        row = {
            "v": 1,
            "event": event,
            "attempt": str(self.attempt),
            "time": self.clock,
            "updates": self.updates,
            "from": self.resumed,
            "fresh": self.is_fresh,
            "spent": self.spent,
            **more,
        }
        with self.file.open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def spent(ledger: RunLedger) -> Mapping[str, float]:
    """What is not nothing, of what adds up."""
    seconds = ledger.seconds
    assert tuple(seconds) == KINDS
    assert sum(seconds.values()) == pytest.approx(ledger.wall, rel=1e-9)
    return {kind: round(each, 6) for kind, each in seconds.items() if each}


def test_work_after_the_checkpoint_that_is_gone_on_from_is_lost(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    writer.train()
    writer.update(3)
    writer.save()
    writer.update(2)
    writer.spend("data", 0.5)
    writer.spend("evaluation", 0.25)
    writer.line("beat")
    assert spent(read_ledger(tmp_path)) == {
        "set-up": 10,
        "compute": 10,
        "data": 0.5,
        "evaluation": 0.25,
        "save": 1,
    }
    writer.start(after=30)
    writer.train(resumed=3)
    writer.update(4)
    writer.save()
    writer.line("end", ended="finished")
    ledger = read_ledger(tmp_path)
    assert spent(ledger) == {
        "set-up": 20,
        "compute": 7 * UPDATE,
        "save": 2,
        "lost work": 2 * UPDATE + 0.75,
        "waiting": 30,
    }
    assert ledger.goodput == 7 * UPDATE / ledger.wall
    assert ledger.updates == 7


def test_several_attempts_may_have_to_be_made_again(writer: Writer, tmp_path: Path) -> None:
    """The third begins before all that the second has made, and before some of the first."""
    writer.start()
    writer.train()
    for _ in range(3):
        writer.update(2)
        writer.save()
    writer.start(after=5)
    writer.train(resumed=6)
    writer.update(3)
    writer.line("beat")
    writer.start(after=5)
    writer.train(resumed=4)
    writer.update(1)
    writer.line("beat")
    found = read_ledger(tmp_path)
    assert [each.seconds["lost work"] for each in found.attempts] == [2 * UPDATE + SAVE, 3 * UPDATE, 0]
    assert spent(found)["compute"] == 5 * UPDATE
    assert spent(found)["save"] == 2 * SAVE


def test_an_attempt_that_did_not_come_to_train_loses_nothing(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    writer.train()
    writer.update(2)
    writer.save()
    writer.start(after=3)
    writer.spend("set-up", 4)
    writer.line("beat")
    found = read_ledger(tmp_path)
    assert spent(found) == {"set-up": 14, "compute": 4, "save": 1, "waiting": 3}
    assert found.attempts[1].resumed is None
    assert found.updates == 2


def test_another_run_in_a_directory_does_not_undo_the_one_that_has_finished(
    writer: Writer, tmp_path: Path
) -> None:
    for ended in ("finished", "ValueError", "finished"):
        writer.start()
        writer.train()
        writer.update(3)
        writer.line("end", ended=ended)
    found = read_ledger(tmp_path)
    assert [each.seconds["lost work"] for each in found.attempts] == [0, 3 * UPDATE, 0]


def test_a_run_that_is_taken_back_loses_what_it_made_since(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    writer.train()
    writer.update(4)
    writer.save()
    writer.update(3)
    writer.spend("restore", 1)
    writer.updates = 4
    writer.line("back")
    writer.update(2)
    writer.save()
    writer.line("end", ended="finished")
    found = read_ledger(tmp_path)
    assert spent(found) == {
        "compute": 6 * UPDATE,
        "save": 2,
        "restore": 1,
        "set-up": 10,
        "lost work": 3 * UPDATE,
    }
    writer.start()
    writer.train(resumed=4)
    writer.update(1)
    writer.line("beat")
    again = read_ledger(tmp_path)
    assert again.seconds["lost work"] == 5 * UPDATE + SAVE
    assert again.seconds["compute"] == 5 * UPDATE


def test_a_run_may_be_taken_back_to_before_where_it_was_resumed(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    writer.train(resumed=6)
    writer.update(2)
    writer.updates = 4
    writer.line("back")
    writer.update(1)
    writer.line("beat")
    found = read_ledger(tmp_path)
    assert (found.unreadable, found.updates) == (0, 5)


def test_a_clock_that_was_set_back_makes_nothing_negative(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    writer.train()
    writer.update(5)
    writer.line("end", ended="Preempted")
    writer.start(after=-3600)
    writer.train(resumed=5)
    writer.update(5)
    writer.line("end", ended="finished")
    assert spent(read_ledger(tmp_path)) == {"set-up": 20, "compute": 20}


@pytest.mark.parametrize("size", [1, 20, -1])
def test_a_line_that_a_kill_has_torn_costs_only_itself(writer: Writer, tmp_path: Path, size: int) -> None:
    writer.start()
    writer.train()
    writer.update(3)
    writer.save()
    whole = writer.file.read_bytes()
    writer.update(3)
    writer.line("beat")
    line = writer.file.read_bytes()[len(whole) :]
    writer.file.write_bytes(whole + line[:size])
    found = read_ledger(tmp_path)
    # Without its end a line is whole all the same.
    assert (found.unreadable, found.updates) == ((0, 6) if size == -1 else (1, 3))


HOSTILE = [
    b"",
    b"\x00\xff\xfe",
    b"null",
    b"[" * 50_000,
    b'{"v": 1}',
    b'{"v": 2, "event": "beat"}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": NaN, "updates": 1, "spent": {}}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": 1, "updates": -1, "spent": {}}',
    b'{"v": 1, "event": "beat", "attempt": 1, "time": 1, "updates": 1, "spent": {}}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": 1, "updates": 1, "spent": {"x": 1}}',
    b'{"v": 1, "event": "beat", "attempt": "", "time": 1, "updates": 1, "spent": {"save": []}}',
    b'{"v": 1, "event": "beat", "attempt": "1", "time": 1, "updates": 1' + b"0" * 5000 + b"}",
    b'{"v": 1, "event": "beat", "attempt": "1", "time": 1e14, "updates": 1, "spent": {}}',
    b"x" * 200_000,
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_line_of_a_ledger_is_passed_over(writer: Writer, tmp_path: Path, line: bytes) -> None:
    writer.start()
    writer.train()
    with writer.file.open("ab") as file:
        file.write(line + b"\n")
    writer.update(3)
    writer.line("beat")
    found = read_ledger(tmp_path)
    assert found.updates == 3
    assert bool(found.unreadable) == bool(line)


def test_a_directory_without_a_ledger_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no ledger\.jsonl in .*give the run directory"):
        read_ledger(tmp_path)
    (tmp_path / NAME).write_text("nothing of ours\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"nothing in .* can be read as the ledger of a run"):
        read_ledger(tmp_path)


def test_runs_are_found_below_a_directory(tmp_path: Path) -> None:
    for each in ("b", "a/first", "a/second"):
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / each / NAME).touch()
    assert find_runs(tmp_path) == [tmp_path / each for each in ("a/first", "a/second", "b")]
    assert find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert find_runs(tmp_path / "b" / NAME) == [tmp_path / "b"]


def test_a_run_may_be_given_by_its_ledger(writer: Writer, tmp_path: Path) -> None:
    writer.start()
    assert read_ledger(tmp_path / NAME) == read_ledger(tmp_path)


def test_reading_does_not_wait_for_torch() -> None:
    program = "import sys, drivetrain.run.ledger_report, drivetrain.cli.runs; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "False"
