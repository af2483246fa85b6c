"""Two jobs and one run directory: who gets it, who is refused, and when it is free again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, CheckpointError, ConfigError, LambdaCallback, TaskModule
from drivetrain.checkpoint import CheckpointManager
from drivetrain.checkpoint.saving import lock as locking
from drivetrain.checkpoint.saving.lock import EXPIRES, RENEWS, DirectoryLock, Owner
from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.distributed.launch.process_start import process_started
from drivetrain.distributed.ranks import Ranks
from drivetrain.testing import run_distributed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@dataclass
class Job:
    """Another process, which has told that it is where the test wants it."""

    pid: int
    told: str
    go_on: Callable[[], None]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> int:
        """Let it go on to its end; returns its exit code."""
        self.go_on()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def job(act: Callable[[Callable[[str], None]], None]) -> Iterator[Job]:
    """A process that does something, and waits where it calls what it is given."""
    told, tell = os.pipe()
    wait, let = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(let)

            def meet(text: str) -> None:
                os.write(tell, f"{text}\n".encode())
                os.read(wait, 1)

            act(meet)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(tell)
    os.close(wait)
    try:
        with os.fdopen(told, encoding="utf-8") as lines:
            yield Job(pid, lines.readline(), lambda: os.close(let))
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        with suppress(OSError):
            os.close(let)


def holding(directory: Path) -> Callable[[Callable[[str], None]], None]:
    def hold(meet: Callable[[str], None]) -> None:
        lock = DirectoryLock(str(directory), LOCAL)
        lock.take()
        meet("held")
        lock.release()

    return hold


def fit(run: Path | str, *hooks: LambdaCallback, task: TaskModule | None = None, **options: Any) -> Any:
    checkpoint = CheckpointConfig(every="1 step", by=None)
    trainer = quiet(**{"max_steps": 3, "checkpoint": checkpoint, "run_dir": run, **options}, callbacks=hooks)
    return trainer.fit(task or Regression(), pairs(), resume="auto")


def lock_of(run: Path) -> Path:
    return run / "checkpoints" / "lock.json"


def owner(**changes: Any) -> Owner:
    """A job on another machine that took the lock a minute ago."""
    now = time.time()
    elsewhere = Owner("node7", "another boot", 4321, 99, "SLURM_JOB_ID=42", "abc", now - 60, now - 60)
    return replace(elsewhere, **changes)


def write(path: Path, content: Owner) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(content)), encoding="utf-8")


def test_a_second_live_job_is_refused_and_the_first_is_unharmed(tmp_path: Path) -> None:
    def train(meet: Callable[[str], None]) -> None:
        def on_step_end(run: Any) -> None:
            if run.progress.updates == 2:
                (tmp_path / "checkpoints" / ".saving-update-00000002-half").mkdir()
                meet("training")

        result = fit(tmp_path, LambdaCallback(on_step_end=on_step_end))
        assert result.progress.updates == 3
        assert (tmp_path / "checkpoints" / ".saving-update-00000002-half").exists()

    with job(train) as first:
        assert first.told == "training\n"
        text = rf"in use by another job: process {first.pid} on .*, since 2.* UTC\. Choose another run_dir"
        with pytest.raises(ConfigError, match=text):
            fit(tmp_path)
        with pytest.raises(ConfigError, match=text):  # which would tidy the directory
            CheckpointManager(str(tmp_path / "checkpoints"), CheckpointConfig(by=None)).entries()
        assert first.end() == 0
    assert fit(tmp_path, max_steps=5).progress.updates == 5
    assert not lock_of(tmp_path).exists()


def test_after_a_kill_the_next_job_starts_at_once(tmp_path: Path) -> None:
    def train(meet: Callable[[str], None]) -> None:
        fit(tmp_path, LambdaCallback(on_step_end=lambda run: meet("training")), max_steps=1)

    with job(train) as first:
        assert lock_of(tmp_path).exists()
        first.kill()
    assert lock_of(tmp_path).exists()
    assert fit(tmp_path).progress.updates == 3
    assert os.listdir(tmp_path / "checkpoints").count("lock.json") == 0


def test_a_process_that_only_has_the_number_of_the_owner_is_not_it(tmp_path: Path) -> None:
    with job(holding(tmp_path)) as first:
        lock = DirectoryLock(str(tmp_path), LOCAL)
        with pytest.raises(ConfigError, match="in use by another job"):
            lock.take()
        content = json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))
        assert content["started"] == process_started(first.pid)
        write(tmp_path / "lock.json", Owner(**{**content, "started": content["started"] - 1}))
        lock.take()
        lock.release()


def test_a_job_on_another_machine_keeps_the_lock_for_ten_minutes_after_its_last_renewal(
    tmp_path: Path,
) -> None:
    now = time.time()
    lock = DirectoryLock(str(tmp_path), LOCAL, clock=lambda: now)
    write(tmp_path / "lock.json", owner(renewed=now - EXPIRES + 1))
    text = (
        r"process 4321 on node7, SLURM_JOB_ID=42, since .* remove '.*lock\.json'\. It was renewed 599 s ago"
        " on that machine; after 10 minutes without a renewal it expires"
    )
    with pytest.raises(ConfigError, match=text):
        lock.take()
    now += 2
    lock.take()
    assert json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))["pid"] == os.getpid()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_the_lock_is_renewed_without_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.checkpoint.saving.lock.RENEWS", 0.01)
    lock = DirectoryLock(str(tmp_path), LOCAL)
    lock.take()
    first = (tmp_path / "lock.json").read_text(encoding="utf-8")
    end = time.monotonic() + 60
    while (tmp_path / "lock.json").read_text(encoding="utf-8") == first:
        assert time.monotonic() < end
        time.sleep(0.01)
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_save_renews_the_lock(tmp_path: Path) -> None:
    now = time.time()
    lock = DirectoryLock(str(tmp_path), LOCAL, clock=lambda: now)
    lock.take()
    taken, now = now, now + RENEWS
    lock.confirm()
    content = json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))
    assert (content["since"], content["renewed"]) == (taken, now)
    lock.release()


def test_the_lock_is_released_whatever_ends_the_fit(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        assert lock_of(tmp_path).exists()
        raise RuntimeError("in a callback")

    with pytest.raises(RuntimeError, match="in a callback"):
        fit(tmp_path, LambdaCallback(on_step_end=fail))
    assert not lock_of(tmp_path).exists()
    assert not [each for each in threading.enumerate() if each.name == "drivetrain-lock"]


def test_a_fit_that_saves_nothing_leaves_no_directory(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        assert lock_of(tmp_path / "run").exists()
        raise RuntimeError("at the start")

    with pytest.raises(RuntimeError, match="at the start"):
        fit(tmp_path / "run", LambdaCallback(on_fit_start=fail))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_lock_is_released_at_the_end_of_the_program(tmp_path: Path) -> None:
    import atexit

    def leave(meet: Callable[[str], None]) -> None:
        manager = CheckpointManager(str(tmp_path / "checkpoints"), CheckpointConfig(by=None))
        manager.lock()
        meet("held")
        atexit._run_exitfuncs()

    with job(leave) as first:
        assert lock_of(tmp_path).exists()
        first.end()
    assert not lock_of(tmp_path).exists()


def test_two_fits_at_once_in_one_process_are_refused_and_one_after_the_other_is_fine(tmp_path: Path) -> None:
    def again(run: Any) -> None:
        with pytest.raises(ConfigError, match="another fit of this process has been writing to"):
            fit(tmp_path)

    assert fit(tmp_path, LambdaCallback(on_fit_start=again)).progress.updates == 3
    assert fit(tmp_path, max_steps=4).progress.updates == 4


def test_of_jobs_that_start_at_the_same_moment_one_wins(tmp_path: Path) -> None:
    """Each holds the lock until all have tried; before half of the rounds a dead job has left its lock."""
    rounds, jobs = 40, 3
    gates = [os.pipe() for _ in range(rounds)]
    told, tell = os.pipe()
    dones = [os.pipe() for _ in range(rounds)]
    children = []
    for _ in range(jobs):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for turn in range(rounds):
                    lock = DirectoryLock(str(tmp_path / str(turn)), LOCAL)
                    os.read(gates[turn][0], 1)
                    try:
                        lock.take()
                        os.write(tell, b"W")
                    except ConfigError:
                        os.write(tell, b"L")
                    os.read(dones[turn][0], 1)
                    lock.release()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    outcomes = []
    for turn in range(rounds):
        if turn % 2:
            write(tmp_path / str(turn) / "lock.json", owner(renewed=0.0))
        os.write(gates[turn][1], b"g" * jobs)
        found = b""
        while len(found) < jobs:
            found += os.read(told, jobs)
        outcomes.append(bytes(sorted(found)))
        os.write(dones[turn][1], b"d" * jobs)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    for each in (*gates, *dones, (told, tell)):
        os.close(each[0])
        os.close(each[1])
    assert codes == [0] * jobs
    assert outcomes == [b"LLW"] * rounds


def test_of_two_that_take_over_the_lock_of_a_dead_job_the_second_gives_back_what_it_took(
    tmp_path: Path,
) -> None:
    write(tmp_path / "lock.json", owner(renewed=0.0))
    first = DirectoryLock(str(tmp_path), LOCAL)

    def overtaken() -> float:
        if not first.is_held:
            first.take()
        return time.time()

    with pytest.raises(ConfigError, match="another fit of this process"):
        DirectoryLock(str(tmp_path), LOCAL, clock=overtaken).take()
    assert os.listdir(tmp_path) == ["lock.json"]
    first.release()
    assert os.listdir(tmp_path) == []


def test_a_job_whose_lock_was_taken_ends_at_its_next_save(tmp_path: Path) -> None:
    def lose(run: Any) -> None:
        if run.progress.updates == 2:
            write(lock_of(tmp_path), owner())

    with pytest.raises(ConfigError, match="in use by another job: process 4321 on node7"):
        fit(tmp_path, LambdaCallback(on_step_end=lose))
    assert json.loads(lock_of(tmp_path).read_text(encoding="utf-8"))["pid"] == 4321  # not its own to remove
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["index.json", "lock.json", "update-00000001"]


def test_what_another_job_holds_by_now_is_not_released(tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path), LOCAL)
    lock.take()
    write(tmp_path / "lock.json", owner())
    lock.release()
    assert json.loads((tmp_path / "lock.json").read_text(encoding="utf-8"))["pid"] == 4321


def test_a_copy_of_the_process_does_not_release_the_lock(tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path), LOCAL)
    lock.take()
    with job(lambda meet: lock.release()) as copy:
        assert copy.end() == 0
    assert (tmp_path / "lock.json").exists()
    lock.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    seen = []

    def remove(run: Any) -> None:
        seen.append(lock_of(tmp_path).exists())
        lock_of(tmp_path).unlink()

    fit(tmp_path, LambdaCallback(on_step_end=remove))
    assert seen == [True] * 3


def test_a_file_that_is_no_lock_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    lock_of(tmp_path).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lock\.json' is not a lock that drivetrain wrote.* remove"):
        fit(tmp_path)


def _lock_on_ranks(directory: str) -> str:
    manager = CheckpointManager(directory, CheckpointConfig(by=None), ranks=Ranks.of_job())
    try:
        manager.lock()
    except ConfigError as error:
        return str(error)
    manager.entries()
    manager.release()
    return ""


def _fit_on_ranks(run: Path) -> bool:
    held = []
    fit(
        run,
        LambdaCallback(on_step_end=lambda _: held.append(lock_of(run).exists())),
        strategy="ddp",
        devices=2,
    )
    return all(held)


def test_ranks_share_one_lock_and_all_hear_of_a_refusal(tmp_path: Path) -> None:
    with job(holding(tmp_path / "checkpoints")) as first:
        texts = run_distributed(_lock_on_ranks, str(tmp_path / "checkpoints"))
        assert len(texts) == 2
        assert all(f"in use by another job: process {first.pid}" in each for each in texts)
        assert first.end() == 0
    assert run_distributed(_lock_on_ranks, str(tmp_path / "checkpoints")) == ["", ""]
    assert run_distributed(_fit_on_ranks, tmp_path) == [True, True]
    assert not lock_of(tmp_path).exists()


def test_a_directory_that_cannot_be_written_goes_by_the_policy_of_saves(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("", encoding="utf-8")
    checkpoint = CheckpointConfig(every="1 step", by=None, directory=str(place))

    def free(run: Any) -> None:
        if run.progress.updates == 2:
            place.unlink()

    with pytest.raises(CheckpointError, match="cannot lock"):
        fit(tmp_path / "run", checkpoint=checkpoint)
    with heard() as texts:
        hook = LambdaCallback(on_step_end=free)
        result = fit(tmp_path / "run", hook, checkpoint=checkpoint, on_save_error="warn")
    assert "not protected against another job" in texts[0]
    assert "the checkpoint after update 1 was not saved" in texts[1]
    assert len(texts) == 2
    assert result.last_checkpoint == str(place / "checkpoints" / "update-00000003")


def test_an_object_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    place = f"memory://{tmp_path.name}/checkpoints"
    files = file_system(place)
    first, second = DirectoryLock(place, files), DirectoryLock(place, files)
    first.take()
    assert files.kind(first.path) == "file"
    with pytest.raises(ConfigError, match="another fit of this process"):
        second.take()
    first.release()
    assert files.kind(first.path) is None
    second.take()
    second.release()
    now = time.time()
    elsewhere = json.dumps(asdict(owner(renewed=now))).encode()
    sink = files.create(first.path)
    sink.write(memoryview(elsewhere))
    sink.finish()
    third = DirectoryLock(place, files, clock=lambda: now)
    with pytest.raises(ConfigError, match="on node7"):
        third.take()
    now += EXPIRES
    third.take()
    third.release()
    assert files.entries(place) == {}


def test_in_an_object_store_a_job_that_was_overtaken_as_it_wrote_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    place = f"memory://{tmp_path.name}/checkpoints"
    files, write_file = file_system(place), locking.write_file

    def overtaken(path: str, *_: Any) -> int:
        return write_file(path, [json.dumps(asdict(owner())).encode()], files)

    monkeypatch.setattr(locking, "write_file", overtaken)
    with pytest.raises(ConfigError, match="on node7"):
        DirectoryLock(place, files).take()
