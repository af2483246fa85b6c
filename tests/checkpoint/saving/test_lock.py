"""Two jobs and one run directory: who gets it, who is refused, and when it is free again."""

import atexit
import itertools
import json
import math
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, CheckpointError, ConfigError, LambdaCallback
from drivetrain.checkpoint import CheckpointManager
from drivetrain.checkpoint.saving import lock as locking
from drivetrain.checkpoint.saving.lock import EXPIRES, RENEWS, DirectoryLock, Owner
from drivetrain.checkpoint.storage.filesystem import LOCAL, LocalFileSystem
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.distributed.ranks import Ranks

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
Meet = Callable[[], Any]


@contextmanager
def job(act: Callable[[Meet], None]) -> Iterator[Any]:  # until it waits in `meet`; killed, unless by `end`
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process: Any = context.Process(target=act, args=(lambda: (there.send("here"), there.recv()),))

    def end() -> int:
        with suppress(BrokenPipeError):  # one that has ended already
            here.send("go on")
        process.join()
        return int(process.exitcode)

    process.start()
    there.close()
    process.end = end
    try:
        with suppress(EOFError):
            here.recv()
        yield process
    finally:
        process.kill()
        process.join()
        here.close()


def hold(directory: Path, meet: Meet) -> None:
    lock = DirectoryLock(str(directory), LOCAL)
    lock.take()
    meet()
    lock.release()


def fit(run: Path, *hooks: LambdaCallback, **options: Any) -> Any:
    checkpoint = CheckpointConfig(every="1 step", by=None)
    trainer = quiet(**{"max_steps": 3, "checkpoint": checkpoint, "run_dir": run, **options}, callbacks=hooks)
    return trainer.fit(Regression(), pairs(), resume="auto")


def lock_of(run: Path) -> Path:
    return run / "checkpoints" / "lock.json"


def content_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def owner(**changes: Any) -> Owner:  # a job on another machine that took the lock a minute ago
    now = time.time()
    elsewhere = Owner("node7", "another boot", 4321, 99, "SLURM_JOB_ID=42", "abc", now - 60, now - 60)
    return replace(elsewhere, **changes)


def write(path: Path, content: Owner) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


@needs_fork
def test_a_second_live_job_is_refused_and_the_first_is_unharmed(tmp_path: Path) -> None:
    half = tmp_path / "checkpoints" / ".saving-step-00000002-half"

    def train(meet: Meet) -> None:
        def on_step_end(run: Any) -> None:
            if run.progress.steps == 2:
                half.mkdir()
                meet()

        assert fit(tmp_path, LambdaCallback(on_step_end=on_step_end)).progress.steps == 3
        assert half.exists()

    with job(train) as first:
        text = rf"in use by another job: process {first.pid} on .*, since 2.* UTC\. Choose another run_dir"
        with pytest.raises(ConfigError, match=text):
            fit(tmp_path)
        with pytest.raises(ConfigError, match=text):  # which would tidy the directory
            CheckpointManager(str(tmp_path / "checkpoints"), CheckpointConfig(by=None)).entries()
        assert first.end() == 0
    assert fit(tmp_path, max_steps=5).progress.steps == 5
    assert not lock_of(tmp_path).exists()


@needs_fork
def test_after_a_kill_the_next_job_starts_at_once(tmp_path: Path) -> None:
    def train(meet: Meet) -> None:
        fit(tmp_path, LambdaCallback(on_step_end=lambda run: meet()), max_steps=1)

    with job(train):
        assert lock_of(tmp_path).exists()
    assert lock_of(tmp_path).exists()
    assert fit(tmp_path).progress.steps == 3
    assert os.listdir(tmp_path / "checkpoints").count("lock.json") == 0


def test_a_job_on_another_machine_keeps_the_lock_for_ten_minutes_after_its_renewal(tmp_path: Path) -> None:
    now = time.time()
    lock = DirectoryLock(str(tmp_path), LOCAL, clock=lambda: now)
    write(tmp_path / "lock.json", owner(renewed=now - EXPIRES + 1))
    text = r"process 4321 on node7, SLURM_JOB_ID=42, since .* remove '.*lock\.json'\. .* renewed 599 s ago"
    with pytest.raises(ConfigError, match=text):
        lock.take()
    now += 2
    lock.take()
    assert content_of(tmp_path / "lock.json")["pid"] == os.getpid()
    taken, now = now, now + RENEWS
    lock.confirm()  # a save renews the lock
    content = content_of(tmp_path / "lock.json")
    assert (content["since"], content["renewed"]) == (taken, now)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_the_lock_is_renewed_without_saves_and_released_at_exit(tmp_path: Path, monkeypatch: Any) -> None:
    renewed, at_exit = threading.Event(), []

    class Files(LocalFileSystem):
        def rename(self, old: str, new: str) -> None:
            super().rename(old, new)
            renewed.set()

    monkeypatch.setattr(locking, "RENEWS", 0.01)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    lock = DirectoryLock(str(tmp_path), Files(), clock=itertools.count().__next__)
    lock.take()
    assert renewed.wait(300)
    assert at_exit == [lock.release]
    lock.release()
    assert os.listdir(tmp_path) == []


@needs_fork
def test_a_process_with_the_number_of_the_owner_alone_is_not_it(tmp_path: Path, monkeypatch: Any) -> None:
    lock = DirectoryLock(str(tmp_path), LOCAL)
    with job(partial(hold, tmp_path)):
        content = content_of(tmp_path / "lock.json")
        write(tmp_path / "lock.json", Owner(**{**content, "started": content["started"] - 1}))
        with monkeypatch.context() as patch:
            patch.setattr(locking, "process_started", lambda pid: None)  # where no system tells it
            with pytest.raises(ConfigError, match="in use by another job"):
                lock.take()
        lock.take()
        lock.release()


@needs_fork
def test_a_lock_is_released_by_its_owner_alone(tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path), LOCAL)
    lock.take()
    with job(lambda meet: lock.release()) as copy:  # which has all that the owner has, but its number
        assert copy.end() == 0
    assert lock.is_held
    assert content_of(tmp_path / "lock.json")["pid"] == os.getpid()
    write(tmp_path / "lock.json", owner())
    lock.release()
    assert content_of(tmp_path / "lock.json")["pid"] == 4321


STRANGE: list[dict[str, Any]] = [
    *({"renewed": each} for each in ("x", math.nan, 10**400, True, -1)),
    *({"since": math.inf}, {"pid": 2**70}, {"pid": 1.5}, {"started": "x"}, {"host": None}, {"more": 1}),
]


def test_a_removed_lock_file_is_made_again_and_a_strange_one_refused(tmp_path: Path) -> None:
    lock, path = DirectoryLock(str(tmp_path), LOCAL), tmp_path / "lock.json"
    lock.take()
    path.unlink()
    lock.confirm()
    assert content_of(path)["pid"] == os.getpid()
    found = content_of(path)
    strange = ["{", "[" * 60_000, "[]", *(json.dumps({**found, **each}) for each in STRANGE)]
    for text in strange:
        path.write_text(text, encoding="utf-8")
        for each in (lock.confirm, DirectoryLock(str(tmp_path), LOCAL).take):
            with pytest.raises(
                ConfigError, match=r"lock\.json' is not a lock that drivetrain wrote.* remove"
            ):
                each()
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to("gone")) if hasattr(os, "mkfifo") else ():
        path.unlink() if path.is_file() or path.is_fifo() else path.rmdir()
        make(path)
        with pytest.raises(ConfigError, match=r"lock\.json' is not a lock that drivetrain wrote.* remove"):
            DirectoryLock(str(tmp_path), LOCAL).take()
    lock.release()


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_directory_that_cannot_be_locked_is_refused(tmp_path: Path, policy: str) -> None:
    place = tmp_path / "file"
    place.write_text("", encoding="utf-8")
    options = {"checkpoint": CheckpointConfig(every="1 step", by=None, directory=str(place))}
    with pytest.raises(CheckpointError, match="cannot lock"):
        fit(tmp_path / "run", **options, on_save_error=policy)


def test_the_lock_is_released_whatever_ends_the_fit(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        assert lock_of(tmp_path / "run").exists()
        raise RuntimeError("in a callback")

    for hook in ("on_fit_start", "on_step_end"):
        with pytest.raises(RuntimeError, match="in a callback"):
            fit(tmp_path / "run", LambdaCallback(**{hook: fail}))
        assert not lock_of(tmp_path / "run").exists()
        if hook == "on_fit_start":  # a fit that saves nothing leaves no directory
            assert not (tmp_path / "run" / "checkpoints").exists()
    assert not [each for each in threading.enumerate() if each.name == "drivetrain-lock"]


def test_two_fits_at_once_in_one_process_are_refused_and_one_after_the_other_is_fine(tmp_path: Path) -> None:
    def again(run: Any) -> None:
        with pytest.raises(ConfigError, match="another fit of this process has been writing to"):
            fit(tmp_path)

    assert fit(tmp_path, LambdaCallback(on_fit_start=again)).progress.steps == 3
    assert fit(tmp_path, max_steps=4).progress.steps == 4


def test_of_jobs_that_start_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    def race() -> list[bool]:
        won = []
        for turn in range(30):
            if turn % 2 and torch.distributed.get_rank() == 0:  # the lock of a dead job
                write(tmp_path / str(turn) / "lock.json", owner(renewed=0.0))
            lock = DirectoryLock(str(tmp_path / str(turn)), LOCAL)
            torch.distributed.barrier()
            with suppress(ConfigError):
                lock.take()
            won.append(lock.is_held)
            torch.distributed.barrier()
            lock.release()
        return won

    assert [sorted(each) for each in zip(*on_two_ranks(race), strict=True)] == [[False, True]] * 30


def test_a_rank_that_may_only_read_the_disk_is_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = DirectoryLock(str(tmp_path), LOCAL)
    lock.check_seen(token := lock.take(), rank=1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only mount
    with pytest.raises(
        ConfigError, match=r"rank 1 on .* may read .*, and not write to it.* mounted read-only"
    ):
        lock.check_seen(token, rank=1)
    lock.release()


def test_a_rank_that_sees_another_disk_is_named_before_training(tmp_path: Path) -> None:
    def begin() -> str:
        ranks = Ranks.of_job()
        before, locking._APPEARS = locking._APPEARS, 0.0
        managers = [
            CheckpointManager(str(tmp_path / name), CheckpointConfig(), ranks=ranks)
            for name in ("shared", f"disk of {ranks.rank}")
        ]
        managers[0].lock()
        try:
            managers[1].lock()
        except ConfigError as error:
            return str(error)
        finally:
            for each in managers:
                each.release()
            ranks.close()
            locking._APPEARS = before
        return ""

    for text in on_two_ranks(begin):
        assert "rank 1 on " in text
        assert "does not see the lock that rank 0 has written to" in text
        assert "mount the shared disk" in text


def test_a_job_whose_lock_was_taken_ends_at_its_next_save(tmp_path: Path) -> None:
    def lose(run: Any) -> None:
        if run.progress.steps == 2:
            write(lock_of(tmp_path), owner())

    with pytest.raises(ConfigError, match="in use by another job: process 4321 on node7"):
        fit(tmp_path, LambdaCallback(on_step_end=lose))
    assert content_of(lock_of(tmp_path))["pid"] == 4321  # not its own to remove
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["index.json", "lock.json", "step-00000001"]


@needs_fork
def test_ranks_share_one_lock_and_all_hear_of_a_refusal(tmp_path: Path) -> None:
    def lock(directory: str) -> str:
        manager = CheckpointManager(directory, CheckpointConfig(by=None), ranks=Ranks.of_job())
        try:
            manager.lock()
        except ConfigError as error:
            return str(error)
        manager.entries()
        manager.release()
        return ""

    def train(run: Path) -> bool:
        held: list[bool] = []
        hook = LambdaCallback(on_step_end=lambda _: held.append(lock_of(run).exists()))
        fit(run, hook, strategy="ddp", devices=2)
        return all(held)

    with job(partial(hold, tmp_path / "checkpoints")) as first:
        texts = on_two_ranks(lock, str(tmp_path / "checkpoints"))
        assert all(f"in use by another job: process {first.pid}" in each for each in texts)
        assert first.end() == 0
    assert on_two_ranks(train, tmp_path) == [True, True]
    assert not lock_of(tmp_path).exists()


def test_the_lock_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    place = f"memory://{tmp_path.name}/checkpoints"
    files, now = file_system(place), time.time()
    first = DirectoryLock(place, files)
    first.take()
    assert files.kind(first.path) == "file"
    with pytest.raises(ConfigError, match="another fit of this process"):
        DirectoryLock(place, files).take()
    first.release()
    assert files.kind(first.path) is None
    locking.write_file(first.path, [json.dumps(asdict(owner(renewed=now))).encode()], files)
    second = DirectoryLock(place, files, clock=lambda: now)
    with pytest.raises(ConfigError, match="on node7"):
        second.take()
    now += EXPIRES
    second.take()
    second.release()
    assert files.entries(place) == {}
    other, put = json.dumps(asdict(owner())).encode(), locking.write_file
    monkeypatch.setattr(locking, "write_file", lambda path, *_: put(path, [other], files))
    with pytest.raises(ConfigError, match="on node7"):  # another job has written at the same moment
        first.take()
