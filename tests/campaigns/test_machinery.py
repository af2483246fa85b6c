"""The campaigns notice what is wrong, and say how to repeat it."""

import json
import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns.checkpoints import Score
from tests.campaigns.endurance import Course, Measure, Watch, apart
from tests.campaigns.restart_job import EPOCHS, SAMPLES
from tests.campaigns.restarts import Job
from tests.campaigns.restarts import Score as RestartScore
from tests.campaigns.trials import Case, run_case
from tests.support.fault_kinds import OPERATIONS
from tests.support.faults import FaultyFileSystem, read_bytes, write_bytes
from tests.support.memory import MemoryDisk, MemoryObjects
from tests.support.storage import check_checkpoint_io, check_file_system
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback
from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.checkpoint.storage.filesystem import LOCAL


def test_a_faulty_file_system_is_sound_but_for_its_faults(tmp_path: Path) -> None:
    check_file_system(LOCAL, str(tmp_path / "disk"))
    files = FaultyFileSystem(LOCAL)
    check_file_system(files, str(tmp_path / "files"))
    check_checkpoint_io(DirectoryCheckpointIO(files), str(tmp_path / "checkpoints"), os.path.join)
    assert {step.operation for step in files.steps} == set().union(*OPERATIONS.values())
    assert files.struck() == []
    for storage in (MemoryDisk(), MemoryObjects()):
        check_file_system(storage, "/files")


class Hoarder(MemoryDisk):  # deletes nothing
    def delete(self, path: str) -> None:
        pass


class Swapper(MemoryDisk):  # the second checkpoint has the first's content: every hash is right
    def rename(self, old: str, new: str) -> None:
        if new.endswith("step-00000002"):
            for name in self.entries(old):
                self.delete(f"{old}/{name}")
                write_bytes(self, f"{old}/{name}", read_bytes(self, f"/trial/step-00000001/{name}"))
        super().rename(old, new)


def test_a_bad_disk_is_found_out_by_a_trial_that_its_text_repeats() -> None:
    text = "disk/foreground/55:kill:0"
    for files, complaint in ((Hoarder(), "was left behind"), (Swapper(), "step 2 was saved, and is lost")):
        score = Score()
        score.add(run_case(Case.parse(text), "/trial", files))
        assert f"FAILED: {text}" in str(score)
        assert complaint in str(score)
        assert str(score).endswith("failures: 1")
    for wrong in ("disk", "tape/background/1:kill:0", "disk/background/1:murder:0", "disk/x/y"):
        with pytest.raises(ArgumentTypeError, match="is no trial; one is"):
            Case.parse(wrong)


def test_what_grows_in_a_run_is_noticed() -> None:
    kept: list[Any] = []
    watch, hoard = Watch(20), LambdaCallback(on_step_end=lambda run: kept.append([run.progress.steps]))
    with apart():
        quiet(max_steps=200, log_every="20 steps", callbacks=[hoard, watch]).fit(Regression(), pairs(20))
    course = Course("hoarding", watch.measures)
    assert course.grown == ["objects"], f"\n{course}"

    def of(**values: int) -> Measure:
        return Measure(**{**dict.fromkeys(Measure._fields, 1000), **values})

    assert Course("steady", [of(memory=0), *(of() for _ in range(9))]).grown == []
    assert Course("leaking", [of(descriptors=100 + each) for each in range(10)]).grown == ["descriptors"]


def test_samples_that_restarts_lose_or_repeat_are_found(tmp_path: Path) -> None:
    job, steps = Job(tmp_path, "ddp"), EPOCHS * SAMPLES // 4

    def judge(*attempts: tuple[int, int, int], **change: Any) -> RestartScore:
        """Write down what two processes do in each attempt: steps of four samples."""
        for attempt, first, until in attempts:
            for rank in range(2):
                rows = [{"step": None, "time": float(attempt)}]
                for step in range(first, until):
                    start = step % (SAMPLES // 4) * 4 + 2 * rank
                    row = {"step": step + 1, "epoch": step * 4 // SAMPLES, "samples": [start, start + 1]}
                    rows.append({**row, "time": attempt + 0.01 * (step - first + 1), **change})
                file = tmp_path / f"witness-{attempt}.000-{rank}.jsonl"
                file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        score = RestartScore()
        job.judge(score)
        return score

    score = judge((100, 0, 50), (200, 40, steps))
    assert (score.failures, score.counted, score.again) == ([], steps, 10)
    assert score.useful == pytest.approx(0.01 * steps)
    assert "lost {120, 121, 122, 123}, repeated []" in judge((100, 0, 30), (200, 31, steps)).failures[0]
    assert "lost {120, 122, 123}, repeated [0, 121]" in judge((150, 30, 31), samples=[0, 121]).failures[0]
