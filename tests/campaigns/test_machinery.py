"""The campaigns notice what is wrong, and say how to repeat it."""

from __future__ import annotations

import errno
import json
import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from tests.campaigns.checkpoints import Score, main, run_campaign
from tests.campaigns.endurance import Course, Measure, Watch, apart
from tests.campaigns.restart_job import EPOCHS, SAMPLES
from tests.campaigns.restarts import Job
from tests.campaigns.restarts import Score as RestartScore
from tests.campaigns.trials import Case, run_case
from tests.support.fault_kinds import OPERATIONS, Fault, Killed, Step
from tests.support.faults import FaultyFileSystem, read_bytes, write_bytes
from tests.support.memory import MemoryDisk, MemoryObjects
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback
from drivetrain.checkpoint import DirectoryCheckpointIO
from drivetrain.checkpoint.storage.files import write_file
from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.testing.storage import check_checkpoint_io, check_file_system

CONTENT = bytes(range(200))


def read_or_none(files: Any, path: str) -> bytes | None:
    return read_bytes(files, path) if files.kind(path) == "file" else None


def test_a_faulty_file_system_is_sound_but_for_its_faults(tmp_path: Path) -> None:
    files = FaultyFileSystem(LOCAL)
    check_file_system(files, str(tmp_path / "files"))
    check_checkpoint_io(DirectoryCheckpointIO(files), str(tmp_path / "checkpoints"), os.path.join)
    assert {step.operation for step in files.steps} == set().union(*OPERATIONS.values())
    assert files.struck() == []
    for storage in (MemoryDisk(), MemoryObjects()):
        check_file_system(storage, "/files")


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (1, "ENOSPC"),
        (2, "full disk"),
        (2, "lying write"),
        (3, "truncate"),
        (3, "drop"),
        (2, "flip"),
        (5, "flip"),
    ],
)
def test_each_fault_is_what_it_is_called(tmp_path: Path, operation: int, kind: Any) -> None:
    """The operations are: to create a file, to write it, to finish it, to open it, to read it."""
    files, path = FaultyFileSystem(LOCAL, Fault(operation, kind, 1), root=str(tmp_path)), str(tmp_path / "f")
    try:
        write_file(path, [CONTENT], files)
        error = None
    except OSError as caught:
        error = caught.errno
    found = read_or_none(files, path)
    if kind in ("ENOSPC", "full disk"):
        assert error == errno.ENOSPC
        if found is not None:
            assert 0 < len(found) < len(CONTENT)
            files.delete(path)
        files.heal()
        write_file(path, [CONTENT], files)
        assert read_bytes(files, path) == CONTENT
    else:
        assert error is None
        assert found != CONTENT
    if kind in ("lying write", "truncate"):
        assert CONTENT.startswith(found or b"")
    elif kind == "flip":
        assert sum((a ^ b).bit_count() for a, b in zip(found or b"", CONTENT, strict=True)) == 1
        assert (read_bytes(LOCAL, path) == CONTENT) == (operation == 5)
    assert [step.fault for step in files.struck()] == [kind]


def test_the_killed_do_nothing_more_and_a_lost_answer_is_of_what_was_done(tmp_path: Path) -> None:
    for operation, seed in ((each, seed) for each in (1, 2, 3) for seed in range(6)):
        path = str(tmp_path / f"{operation}-{seed}")
        files = FaultyFileSystem(LOCAL, Fault(operation, "kill", seed))
        with pytest.raises(Killed):
            write_file(path, [CONTENT], files)
        assert CONTENT.startswith(read_or_none(LOCAL, path) or b"")
        for act in (files.kind, files.entries, files.create, files.open, files.delete, files.sync):
            with pytest.raises(Killed):
                act(path)
    files, path = FaultyFileSystem(LOCAL, Fault(4, "lost answer")), str(tmp_path / "f")
    write_bytes(files, path, CONTENT)
    with pytest.raises(OSError, match="Input/output"):
        files.rename(path, f"{path}2")
    assert read_bytes(LOCAL, f"{path}2") == CONTENT
    assert files.struck() == [Step("rename", path, "lost answer")]


def test_a_power_cut_leaves_the_disk_as_a_machine_could_find_it(tmp_path: Path) -> None:
    found = set()
    for seed in range(30):
        place = tmp_path / str(seed)
        place.mkdir()
        (place / "before").write_bytes(CONTENT)
        files = FaultyFileSystem(LOCAL, Fault(7, "power cut", seed), root=str(place))
        write_bytes(files, str(place / "safe"), CONTENT)
        files.sync(str(place))
        files.rename(str(place / "before"), str(place / "after"))
        with pytest.raises(Killed):
            write_file(str(place / "torn"), [CONTENT], files)
        assert (place / "safe").read_bytes() == CONTENT
        found.add(tuple(sorted(each.name for each in place.iterdir())))
    # Neither the renaming nor the new name was synced: each may have reached the disk, or not.
    assert found == {(name, "safe", *new) for name in ("after", "before") for new in ((), ("torn",))}


class Hoarder(MemoryDisk):
    """Deletes nothing."""

    def delete(self, path: str) -> None:
        pass


class Swapper(MemoryDisk):
    """Keeps the second checkpoint's name, with the content of the first: every hash in it is right."""

    def rename(self, old: str, new: str) -> None:
        if new.endswith("update-00000002"):
            for name in self.entries(old):
                self.delete(f"{old}/{name}")
                write_bytes(self, f"{old}/{name}", read_bytes(self, f"/trial/update-00000001/{name}"))
        super().rename(old, new)


def test_a_bad_disk_is_found_out_by_a_trial_that_its_text_repeats() -> None:
    text = "disk/foreground/55:kill:0"
    for files, complaint in ((Hoarder(), "was left behind"), (Swapper(), "update 2 was saved, and is lost")):
        score = Score()
        score.add(run_case(Case.parse(text), "/trial", files))
        assert f"FAILED: {text}" in str(score)
        assert complaint in str(score)
        assert str(score).endswith("failures: 1")
    for wrong in ("disk", "tape/background/1:kill:0", "disk/background/1:murder:0", "disk/x/y"):
        with pytest.raises(ArgumentTypeError, match="is no trial; one is"):
            Case.parse(wrong)


def test_the_command_prints_its_score_and_the_same_seed_gives_the_same_campaign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--faults", "10", "--kills", "1", "--shards", "0", "--remote", "--directory", str(tmp_path)]
    assert main(few) == 0
    printed = capsys.readouterr().out
    assert "SIGKILL" in printed
    assert "wrong bytes: 0" in printed
    assert printed.endswith("failures: 0\n")
    assert list(tmp_path.iterdir()) == []
    first, second, other = (str(run_campaign(10, seed, "/campaign", ("objects",))) for seed in (5, 5, 6))
    assert first == second != other


def test_what_grows_in_a_run_is_noticed() -> None:
    kept: list[Any] = []
    watch, hoard = Watch(20), LambdaCallback(on_step_end=lambda run: kept.append([run.progress.updates]))
    with apart():
        quiet(max_steps=200, log_every="20 steps", callbacks=[hoard, watch]).fit(Regression(), pairs(20))
    course = Course("hoarding", watch.measures)
    assert course.grown == ["objects"], f"\n{course}"

    def of(**values: int) -> Measure:
        return Measure(**{**dict.fromkeys(Measure._fields, 1000), **values})

    assert Course("steady", [of(memory=0), *(of() for _ in range(9))]).grown == []
    assert Course("leaking", [of(descriptors=100 + each) for each in range(10)]).grown == ["descriptors"]


def test_samples_that_restarts_lose_or_repeat_are_found(tmp_path: Path) -> None:
    job, updates = Job(tmp_path, "ddp"), EPOCHS * SAMPLES // 4

    def judge(*attempts: tuple[int, int, int], **change: Any) -> RestartScore:
        """Write down what two processes do in each attempt: updates of four samples."""
        for attempt, first, until in attempts:
            for rank in range(2):
                rows = [{"update": None, "time": float(attempt)}]
                for update in range(first, until):
                    start = update % (SAMPLES // 4) * 4 + 2 * rank
                    row = {
                        "update": update + 1,
                        "epoch": update * 4 // SAMPLES,
                        "samples": [start, start + 1],
                    }
                    rows.append({**row, "time": attempt + 0.01 * (update - first + 1), **change})
                file = tmp_path / f"witness-{attempt}.000-{rank}.jsonl"
                file.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        score = RestartScore()
        job.judge(score)
        return score

    score = judge((100, 0, 50), (200, 40, updates))
    assert (score.failures, score.counted, score.again) == ([], updates, 10)
    assert score.useful == pytest.approx(0.01 * updates)
    assert "lost {120, 121, 122, 123}, repeated []" in judge((100, 0, 30), (200, 31, updates)).failures[0]
    assert "lost {120, 122, 123}, repeated [0, 121]" in judge((150, 30, 31), samples=[0, 121]).failures[0]
