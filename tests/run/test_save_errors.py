"""A run whose directory is full or read-only: what it says, whether it goes on, what is left."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.saving import at, file_size_limit, let_writing_end, names, told, train

from drivetrain import Callback, CheckpointError, LambdaCallback
from drivetrain.checkpoint import verify
from drivetrain.testing import run_distributed

UNSAVED = "was not saved"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:  # a real file system of 4 MiB
    directory = tmp_path / "disk"
    directory.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={4 << 20}", "tmpfs", str(directory)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def fill(disk: Path, left: int = 300_000) -> None:
    let_writing_end()
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_end_a_run_that_warns_and_later_saves_succeed(
    small_disk: Path, tmp_path: Path, asynchronous: bool
) -> None:
    run, seen = small_disk / "run", []

    def look(each: Any) -> None:
        if each.progress.steps == 9:
            seen.append((names(run), each.last_checkpoint))
            for name in ("step-00000002", "step-00000004"):
                verify(str(run / "checkpoints" / name))
            (small_disk / "filler").unlink()

    full = at(5, lambda: fill(small_disk))
    with told("the checkpoint after step 6 was not saved: cannot write") as text:
        task, result = train(run, full, LambdaCallback(on_step_end=look), asynchronous=asynchronous)
    assert "(ENOSPC); free some space" in text[0]
    assert f"The newest checkpoint is still {run}/checkpoints/step-00000004" in text[0]
    (left, newest), *_ = seen
    assert os.path.basename(newest) == "step-00000004"
    assert {"index.json", "step-00000002", "step-00000004"} <= set(left)
    assert names(run) == ["index.json", "step-00000010", "step-00000012"]
    assert result.last_checkpoint.endswith("step-00000012")
    assert weights(task) == weights(train(tmp_path / "undisturbed")[0])


def test_on_save_error_raises_by_default_and_names_what_is_left(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write '.*step-00000004.*ENOSPC") as caught:
        train(small_disk / "run", at(4, lambda: fill(small_disk)), on_save_error="raise")
    notes = str(caught.value.__notes__)
    assert f"the newest checkpoint is {small_disk}/run/checkpoints/step-00000002" in notes
    (small_disk / "filler").unlink()
    last = LambdaCallback(on_fit_end=lambda run: fill(small_disk, 100_000))
    with pytest.raises(CheckpointError, match=r"cannot write '.*model.safetensors'.*ENOSPC") as caught:
        train(small_disk / "other", last)
    assert "step-00000012" in str(caught.value.__notes__)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_warns_raises_if_its_end_cannot_be_saved(small_disk: Path, asynchronous: bool) -> None:
    run = small_disk / "run"
    with heard(UNSAVED), pytest.raises(CheckpointError, match=r"cannot write '.*step-00000012") as caught:
        train(run, at(9, lambda: fill(small_disk, 500_000)), asynchronous=asynchronous)
    assert f"the newest checkpoint is {run}/checkpoints/step-00000008" in str(caught.value.__notes__)
    assert names(run) == ["index.json", "step-00000006", "step-00000008"]


# The logs.

VALUES = LambdaCallback(on_log=lambda run: [run.log(f"value {each}", each / 7) for each in range(300)])
"""A log point is more than is left of any page of a disk, and some of it finds room."""
FILES = {"csv": "metrics.csv", "jsonl": "metrics.jsonl", "tensorboard": "events.out.tfevents"}


def steps_in(run: Path, name: str) -> list[int]:  # the steps of a log, as its readers see them
    if name == "tensorboard":
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        return [each.step for each in reading.EventAccumulator(str(run)).Reload().Scalars("train/loss")]
    rows = (run / FILES[name]).read_text(encoding="utf-8").splitlines()
    if name == "jsonl":
        return [json.loads(row)["step"] for row in rows]
    assert all(len(row.split(",")) == len(rows[0].split(",")) for row in rows)
    return [int(row.split(",")[0]) for row in rows[1:]]


@pytest.mark.parametrize("name", FILES)
def test_a_logger_on_a_full_disk_lacks_rows_and_goes_on_whole(small_disk: Path, name: str) -> None:
    run, options = small_disk / "run", {"loggers": (name,), "log_every": 1, "checkpoint": False}
    full, free = at(5, lambda: fill(small_disk, 0)), at(9, (small_disk / "filler").unlink)
    with told("Logger logs at step 5 was not saved: cannot write '") as text:
        _, result = train(run, VALUES, full, free, **options)
    assert f"cannot write '{run}/{FILES[name]}" in text[0]
    assert "No space left on device (ENOSPC); free some space" in text[0]
    assert not list(run.glob("*.tmp"))
    assert "There is no checkpoint of this run yet" in text[0]
    assert "Later values are written if that is possible; these values are lost" in text[0]
    assert result.progress.steps == 12
    assert steps_in(run, name) == [1, 2, 3, 4, 9, 10, 11, 12]


def die() -> None:
    raise KeyboardInterrupt


class Fills(Callback):  # the disk, once the run directory is locked
    def __init__(self, disk: Path) -> None:
        self.disk = disk

    @contextmanager
    def wrap_run(self, run: Any) -> Iterator[None]:
        fill(self.disk, 0)
        yield


def test_a_resumed_run_goes_on_in_its_logs_though_the_disk_is_full(small_disk: Path) -> None:
    """The rows after the checkpoint are cut, which needs no room; TensorBoard is told once there is some."""
    run, options = small_disk / "run", {"log_every": 1, "keeps": {"every": "3 steps"}}
    with pytest.raises(KeyboardInterrupt):
        train(run, at(6, die), VALUES, loggers=tuple(FILES), **options)
    with heard(UNSAVED):
        free = at(7, (small_disk / "filler").unlink)
        train(run, Fills(small_disk), free, VALUES, loggers=tuple(FILES), **options)
    for name in FILES:
        steps = steps_in(run, name)
        assert steps == sorted(set(steps)), name
        assert (steps[:3], steps[-6:]) == ([1, 2, 3], [7, 8, 9, 10, 11, 12]), name


def test_a_log_that_a_resumed_run_cannot_cut_goes_by_on_save_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    options = {"loggers": ("csv", "jsonl"), "log_every": 1, "keeps": {"every": "3 steps"}}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, at(5, die), **options)
    monkeypatch.setattr("os.ftruncate", refuse)
    with pytest.raises(OSError, match=r"metrics\.csv") as caught:
        train(tmp_path, **options, on_save_error="raise")
    assert "CSVLogger changes in its log to go on after step 3 was not saved" in caught.value.__notes__[0]
    with heard("changes in its log") as texts:
        train(tmp_path, **options)
    assert [each.split()[1] for each in texts] == ["CSVLogger", "JSONLinesLogger"]
    for name in ("csv", "jsonl"):
        assert steps_in(tmp_path, name) == [1, 2, 3, 4, *range(4, 13)]


def on_a_rank(directory: Path, on_save_error: str, asynchronous: bool) -> Any:
    limits = file_size_limit(10_000)

    def limit(act: Any) -> None:
        let_writing_end()
        if torch.distributed.get_rank() == 1:
            act()

    begin = at(3, lambda: limit(limits.__enter__))
    end = at(5, lambda: limit(lambda: limits.__exit__(*[None] * 3)))
    options: dict[str, Any] = {"strategy": "fsdp", "devices": 2, "max_steps": 6}
    options["on_save_error"] = on_save_error
    with heard() as caught:
        _, result = train(directory, begin, end, asynchronous=asynchronous, **options)
    return [each for each in caught if "not saved" in each], result.last_checkpoint


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_shard_that_one_rank_cannot_write_is_everyones(tmp_path: Path, asynchronous: bool) -> None:
    first, second = on_two_ranks(on_a_rank, tmp_path, "warn", asynchronous)
    assert len(first[0]) == 1
    words = ("the checkpoint after step 4 was not saved: cannot write", "(EFBIG)", "happened on rank 1")
    assert all(each in first[0][0] for each in words)
    assert second[0] == []
    assert first[1] == second[1]
    assert names(tmp_path) == ["index.json", "step-00000002", "step-00000006"]


def test_a_shard_that_one_rank_cannot_write_ends_all_by_default(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot write .*step-00000004.*EFBIG"):
        run_distributed(on_a_rank, tmp_path, "raise", False)
    assert names(tmp_path) == ["index.json", "step-00000002"]
