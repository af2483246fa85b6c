"""Runs survive signals and kills, and the campaign would notice if they did not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.campaigns.restart_job import EPOCHS, SAMPLES
from tests.campaigns.restarts import Job, Score, main, run_kills

from drivetrain.run.ledger_report import read_ledger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs signals, and finds processes by /proc")


def write(job: Job, attempt: int, first: int, until: int, **change: Any) -> None:
    """What two processes write down of an attempt: updates of four samples."""
    job.directory.mkdir(exist_ok=True)
    per_epoch = SAMPLES // 4
    for rank in range(2):
        rows = [{"update": None, "time": float(attempt)}]
        for update in range(first, until):
            start = update % per_epoch * 4 + 2 * rank
            row = {"update": update + 1, "epoch": update // per_epoch, "samples": [start, start + 1]}
            rows.append({**row, "time": attempt + 0.01 * (update - first + 1), **change})
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (job.directory / f"witness-{attempt}.000-{rank}.jsonl").write_text(text, encoding="utf-8")


def judged(job: Job) -> Score:
    score = Score()
    job.judge(score)
    return score


def test_what_was_made_again_counts_once(tmp_path: Path) -> None:
    job, updates = Job(tmp_path / "job", "ddp"), EPOCHS * SAMPLES // 4
    write(job, 100, 0, 50)
    write(job, 200, 40, updates)
    score = judged(job)
    assert score.failures == []
    assert (score.counted, score.again) == (updates, 10)
    assert score.useful == pytest.approx(0.01 * updates)


def test_a_lost_and_a_repeated_sample_are_found(tmp_path: Path) -> None:
    job, updates = Job(tmp_path / "job", "ddp"), EPOCHS * SAMPLES // 4
    write(job, 100, 0, 30)
    write(job, 200, 31, updates)
    assert "epoch 0: lost {120, 121, 122, 123}, repeated []" in judged(job).failures[0]
    write(job, 150, 30, 31, samples=[0, 121])
    assert "lost {120, 122, 123}, repeated [0, 121]" in judged(job).failures[0]


@pytest.mark.full
def test_signals_at_random_moments_change_no_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--signals", "2", "--strategies", "single", "--seed", "1", "--directory", str(tmp_path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "faults survived: 2" in printed
    assert printed.strip().endswith("failures: 0")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_killed_process_is_started_again_and_no_sample_is_lost(tmp_path: Path) -> None:
    score = run_kills(1, 0, tmp_path, "ddp", lambda text: None)
    assert score.failures == []
    assert (score.runs, score.faults.total(), len(score.recoveries)) == (1, 1, 1)
    output = (tmp_path / "kills-ddp-0" / "output").read_text(encoding="utf-8")
    assert "was killed by SIGKILL; all are started again" in output
    assert "drivetrain: training again" in output
    ledger = read_ledger(tmp_path / "kills-ddp-0" / "run")
    first, *_, last = ledger.attempts
    assert (first.ended, last.ended) == (None, "finished")
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall, rel=0.01)
    assert score.wall * 0.5 < ledger.wall < score.wall * 1.01  # without the launcher's own begin and end
    assert ledger.seconds["waiting"] > 0
