"""A run whose directory is full or read-only: what it says, whether it goes on, what is left."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.saving import at, file_size_limit, let_writing_end, names, told, train

from drivetrain import LambdaCallback
from drivetrain.checkpoint import verify
from drivetrain.core.errors import CheckpointError
from drivetrain.testing import run_distributed

SIZE = 4 << 20


def mounted(directory: Path, *options: str) -> None:
    """Mount, and skip where that is not allowed."""
    try:
        subprocess.run(["mount", *options, str(directory)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted(directory, "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def fill(disk: Path, left: int = 300_000) -> None:
    """Leave room for no checkpoint, once nothing is being written."""
    let_writing_end()
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - left))


@contextmanager
def warned() -> Iterator[None]:
    """It is known that something is not saved."""
    with heard("was not saved|.*not protected against another job"):
        yield


# The checkpoints.


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_does_not_end_the_run_and_later_saves_succeed(
    small_disk: Path, tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run, seen = small_disk / "run", []

    def look(each: Any) -> None:
        if each.progress.updates == 9:
            seen.append((names(run), each.last_checkpoint, each.save_errors.counts))
            for name in ("update-00000002", "update-00000004"):
                verify(str(run / "checkpoints" / name))
            (small_disk / "filler").unlink()

    full = at(5, lambda: fill(small_disk))
    caplog.set_level(logging.DEBUG, "drivetrain.run.save_errors")  # which has those after the first of a kind
    with told("the checkpoint after update 6 was not saved: cannot write") as text:
        task, result = train(run, full, LambdaCallback(on_step_end=look), asynchronous=asynchronous)
    assert "(ENOSPC); free some space" in text[0]
    assert f"The newest checkpoint is still {run}/checkpoints/update-00000004" in text[0]
    (left, newest, counts), *_ = seen
    assert len(caplog.messages) == counts["checkpoint"]
    assert counts["checkpoint"] == 2 or asynchronous  # in which that of update 8 may end in time
    assert os.path.basename(newest) == "update-00000004"
    assert {"index.json", "update-00000002", "update-00000004"} <= set(left)
    assert names(run) == ["index.json", "update-00000010", "update-00000012"]
    assert result.last_checkpoint.endswith("update-00000012")
    assert weights(task) == weights(train(tmp_path / "undisturbed")[0])


def test_raising_is_the_default_and_names_what_is_left(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write '.*update-00000004.*ENOSPC") as caught:
        train(small_disk / "run", at(4, lambda: fill(small_disk)), on_save_error="raise")
    assert f"the newest checkpoint is {small_disk}/run/checkpoints/update-00000002" in str(
        caught.value.__notes__
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_whose_end_cannot_be_saved_ends_with_an_error(small_disk: Path, asynchronous: bool) -> None:
    """And its weights, for which there is room, are written."""
    run = small_disk / "run"
    with warned(), pytest.raises(CheckpointError) as caught:
        train(run, at(9, lambda: fill(small_disk, 500_000)), asynchronous=asynchronous)
    text = str(caught.value)
    assert "the run ended after update 12 (max_steps=12 reached), which is not saved: cannot write" in text
    assert f"The newest checkpoint is still {run}/checkpoints/update-00000008" in text
    assert (run / "model.safetensors").exists()
    assert names(run) == ["index.json", "update-00000006", "update-00000008"]


def test_a_run_whose_end_finds_no_room_at_all_says_what_is_lost(small_disk: Path) -> None:
    """Neither a checkpoint nor the weights; nor does it say that it goes on."""
    run = small_disk / "run"
    told_of = told("the checkpoint after update 12 was not saved")
    with told_of as caught, pytest.raises(CheckpointError) as raised:
        train(run, at(11, lambda: fill(small_disk, 0)))
    text = str(raised.value)
    assert "the run ended after update 12 (max_steps=12 reached), which is not saved: cannot" in text
    assert f"The finished weights are not saved either: cannot write '{run}/model.safetensors'" in text
    assert f"The newest checkpoint is still {run}/checkpoints/update-00000010" in text
    assert caught[0].endswith("The run ends with that: it is not tried again")


def test_a_save_that_ends_after_its_run_has_failed_is_not_tried_again(tmp_path: Path) -> None:
    def die() -> None:
        raise RuntimeError("enough")

    saved = told("the checkpoint after update 2 was not saved")
    with file_size_limit(10_000), saved as text, pytest.raises(RuntimeError, match="enough"):
        train(tmp_path, at(3, die), asynchronous=True)
    assert text[0].endswith("The run ends with that: it is not tried again")


def test_a_run_that_was_asked_to_stop_and_cannot_save_says_so(small_disk: Path) -> None:
    stop = LambdaCallback(on_step_end=lambda run: run.progress.updates == 5 and run.stop("it is preempted"))
    with warned(), pytest.raises(CheckpointError) as caught:
        train(small_disk / "run", at(5, lambda: fill(small_disk)), stop)
    assert "the run ended after update 5 (it is preempted), which is not saved" in str(caught.value)


def test_weights_that_cannot_be_written_at_the_end_are_an_error(small_disk: Path) -> None:
    def fill_when_saved(run: Any) -> None:
        fill(small_disk, 100_000)

    last = LambdaCallback(on_fit_end=fill_when_saved)
    with pytest.raises(CheckpointError, match=r"cannot write '.*model.safetensors'.*ENOSPC") as caught:
        train(small_disk / "run", last)
    assert "update-00000012" in str(caught.value.__notes__)


def test_a_read_only_disk_that_becomes_writable_again(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    mounted(place, "--bind", str(source))
    try:

        def mount(how: str) -> None:
            mounted(place, "-o", f"remount,{how},bind")

        with told("(EROFS); use a directory on a writable disk"):
            train(place / "run", at(3, lambda: mount("ro")), at(7, lambda: mount("rw")))
        assert names(place / "run") == ["index.json", "update-00000010", "update-00000012"]
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    limits = file_size_limit(10_000)
    begin = at(3, limits.__enter__)
    end = at(7, lambda: limits.__exit__(None, None, None))
    with told("(EFBIG); raise the limit"):
        train(tmp_path / "run", begin, end)
    assert names(tmp_path / "run")[-1] == "update-00000012"


# The logs.

VALUES = LambdaCallback(on_log=lambda run: [run.log(f"value {each}", each / 7) for each in range(300)])
"""A log point is more than is left of any page of a disk, and some of it finds room."""


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
def test_a_log_that_cannot_be_written_lacks_rows_and_goes_on_whole(small_disk: Path, name: str) -> None:
    run = small_disk / "run"
    with told("Logger logs at update 5 was not saved: cannot write '") as text:
        _, result = train(
            run,
            VALUES,
            at(5, lambda: fill(small_disk, 0)),
            at(9, (small_disk / "filler").unlink),
            loggers=(name,),
            log_every=1,
            checkpoint=False,
        )
    file = {"csv": "metrics.csv", "jsonl": "metrics.jsonl"}.get(name, "events.out.tfevents")
    assert f"cannot write '{run}/{file}" in text[0]
    assert "No space left on device (ENOSPC); free some space" in text[0]
    assert not list(run.glob("*.tmp"))
    assert "There is no checkpoint of this run yet" in text[0]
    assert "what is logged later is written if it can be; this is not written again" in text[0]
    assert result.progress.updates == 12
    assert steps_in(run, name) == [1, 2, 3, 4, 9, 10, 11, 12]


def steps_in(run: Path, name: str) -> list[int]:
    """The steps of a log, as its readers see them."""
    if name == "csv":
        rows = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()
        assert all(len(row.split(",")) == len(rows[0].split(",")) for row in rows)
        return [int(row.split(",")[0]) for row in rows[1:]]
    if name == "jsonl":
        rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["step"] for row in rows]
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(run)).Reload()
    return [each.step for each in found.Scalars("train/loss")]


def test_a_log_that_cannot_be_written_ends_the_run_by_default(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        train(
            small_disk / "run",
            VALUES,
            at(5, lambda: fill(small_disk, 0)),
            loggers=("csv",),
            log_every=1,
            checkpoint=False,
            on_save_error="raise",
        )
    assert f"'{small_disk}/run/metrics.csv'" in str(caught.value)
    notes = " ".join(caught.value.__notes__)
    assert "what CSVLogger logs at update 5 was not saved: cannot write" in notes
    assert "(ENOSPC); free some space, or save to another disk. on_save_error='warn' goes on" in notes
    assert not list((small_disk / "run").glob("*.tmp"))


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard"])
@pytest.mark.parametrize("widened", [False, True])
def test_a_resumed_run_goes_on_in_its_log_though_the_disk_is_full(
    small_disk: Path, name: str, widened: bool
) -> None:
    """Its end is cut, for which no room is needed; TensorBoard is told of it once there is some."""
    run, options = small_disk / "run", {"loggers": (name,), "log_every": 1, "keeps": {"every": "3 steps"}}

    def log_more(each: Any) -> None:
        if widened and each.progress.updates == 5:
            each.log("late", 1.0)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, LambdaCallback(on_step_end=log_more), at(6, die), VALUES, **options)
    fill(small_disk, 0)
    with warned():
        train(run, at(7, (small_disk / "filler").unlink), VALUES, **options)
    steps = steps_in(run, name)
    assert steps == sorted(set(steps))
    assert steps[:3] == [1, 2, 3]
    assert steps[-6:] == [7, 8, 9, 10, 11, 12]
    assert not list(run.glob("*.tmp"))


def test_a_log_that_a_resumed_run_cannot_cut_goes_by_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"loggers": ("csv", "jsonl"), "log_every": 1, "keeps": {"every": "3 steps"}}

    def die() -> None:
        raise KeyboardInterrupt

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, at(5, die), **options)
    monkeypatch.setattr("os.truncate", refuse)
    with pytest.raises(OSError, match=r"metrics\.csv") as caught:
        train(tmp_path, **options, on_save_error="raise")
    assert "CSVLogger changes in its log to go on after update 3 was not saved" in caught.value.__notes__[0]
    with heard() as told:
        train(tmp_path, **options)
    texts = [each for each in told if "changes in its log" in each]
    assert [each.split()[1] for each in texts] == ["CSVLogger", "JSONLinesLogger"]
    assert f"The newest checkpoint is still {tmp_path}/checkpoints/update-00000003" in texts[0]
    for name in ("csv", "jsonl"):
        assert steps_in(tmp_path, name) == [1, 2, 3, 4, *range(4, 13)]


@pytest.mark.parametrize("configured", [False, True])
def test_a_failure_is_printed_once_and_is_in_a_log_that_is_kept(tmp_path: Path, configured: bool) -> None:
    program = """
import logging, sys
from drivetrain.run.save_errors import SaveErrors

if len(sys.argv) > 1:
    logging.basicConfig(filename=sys.argv[1])
    logging.getLogger("drivetrain").setLevel("DEBUG")
errors = SaveErrors("warn")
for each in range(2):
    errors.report("checkpoint", f"number {each}", OSError(28, "No space left on device"), None)
"""
    kept = [str(tmp_path / "log")] if configured else []
    done = subprocess.run([sys.executable, "-c", program, *kept], capture_output=True, text=True, check=True)
    assert done.stderr.count("was not saved") == (0 if configured else 1)
    if configured:
        log = (tmp_path / "log").read_text(encoding="utf-8")
        assert all(log.count(f"number {each} was not saved") == 1 for each in range(2))


# Elsewhere, and together.


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """fsspec's own memory, which refuses for a while."""
    fsspec = pytest.importorskip("fsspec")
    is_down: list[bool] = []

    class Refusing(fsspec.get_filesystem_class("memory")):  # type: ignore[misc]
        protocol = "refusing"
        cachable = False

        def pipe_file(self, path: str, *arguments: Any, **options: Any) -> Any:
            if is_down:
                raise PermissionError(errno.EACCES, "access denied", path)
            return super().pipe_file(path, *arguments, **options)

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    keeps = {"directory": "refusing://bucket/run"}
    with told("(EACCES); check the permissions") as text:
        _, result = train(tmp_path, at(5, lambda: is_down.append(True)), at(9, is_down.clear), keeps=keeps)
    assert "The newest checkpoint is still refusing://bucket/run/checkpoints/update-00000004" in text[0]
    assert result.last_checkpoint == "refusing://bucket/run/checkpoints/update-00000012"


def _on_ranks(directory: Path, on_save_error: str, asynchronous: bool) -> Any:
    rank = torch.distributed.get_rank()
    limits = file_size_limit(10_000)

    def begin() -> None:
        let_writing_end()
        if rank == 1:
            limits.__enter__()

    def end() -> None:
        let_writing_end()
        if rank == 1:
            limits.__exit__(None, None, None)

    with heard() as caught:
        _, result = train(
            directory,
            at(3, begin),
            at(5, end),
            strategy="fsdp",
            devices=2,
            max_steps=6,
            on_save_error=on_save_error,
            asynchronous=asynchronous,
        )
    texts = [each for each in caught if "not saved" in each]
    return texts, result.last_checkpoint


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_part_that_one_rank_cannot_write_is_everyones(tmp_path: Path, asynchronous: bool) -> None:
    first, second = run_distributed(_on_ranks, tmp_path, "warn", asynchronous)
    assert len(first[0]) == 1
    assert "the checkpoint after update 4 was not saved: cannot write" in first[0][0]
    assert "(EFBIG)" in first[0][0]
    assert "this happened on rank 1" in first[0][0]
    assert second[0] == []
    assert first[1] == second[1]
    assert names(tmp_path) == ["index.json", "update-00000002", "update-00000006"]


def test_the_last_line_of_a_job_whose_save_failed_names_what_is_left(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os
import sys
from pathlib import Path

from tests.support.saving import at, file_size_limit, train

limits = file_size_limit(10_000)
begin = limits.__enter__ if os.environ["RANK"] == "1" else int
train(Path(sys.argv[1]), at(3, begin), strategy="fsdp", devices=2, max_steps=6, on_save_error="raise")
""",
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "drivetrain",
        "launch",
        "--devices",
        "2",
        str(program),
        str(tmp_path / "run"),
    ]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=found)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert "rank 1 failed first" in last
    assert "update-00000004/" in last
    assert "(EFBIG)" in last
    assert f"The last checkpoint that is whole is {tmp_path}/run/checkpoints/update-00000002" in last


def test_by_default_it_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"cannot write .*update-00000004.*EFBIG"):
        run_distributed(_on_ranks, tmp_path, "raise", False)
    assert names(tmp_path) == ["index.json", "update-00000002"]
