"""What is said of a loader's worker that is gone, and of data that never comes: real signals, real sleeps."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.distributed.running import LIMIT, run_all
from tests.support.forked import Forked, undisturbed
from tests.support.tasks import FEATURES, Regression, quiet
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import DataError
from drivetrain.data.workers.ends import how_ended, lacks_shared_memory, note_on
from drivetrain.distributed.failure.watchdog import EXIT_HANG

PROGRAM = str(Path(__file__).parents[1] / "programs" / "odd.py")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks")
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
real = pytest.mark.real("workers are killed and hang")


class Odd(Dataset[Any]):
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        made = self.act() if index == 12 else None
        return (torch.full((FEATURES,), float(index)), torch.zeros(1)) if made is None else made


class OddStream(IterableDataset[Any]):  # something happens at the 13th of 24 samples of each worker
    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        rows = Odd(self.act)
        return (rows[index] for index in range(len(rows)))


def ends_by(number: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), number)


def lacks_room() -> None:
    raise RuntimeError("unable to write to file </torch_7>: No space left on device in shared memory")


KILLED = r"was killed by signal SIGKILL: .*lack of memory.*fewer num_workers"
PLACE = r"training data cannot be read on; batch \d of epoch 0"


@LINUX
@real
def test_a_worker_that_is_gone_lacks_room_or_never_answers_is_named_and_is_no_bad_batch() -> None:
    for act, expected in (
        (ends_by(signal.SIGKILL), KILLED),
        (ends_by(signal.SIGBUS), r"was killed by signal SIGBUS: the shared memory.*Enlarge /dev/shm"),
        (lambda: os._exit(3), "ended by itself with exit code 3: "),
        (lambda: os._exit(0), "ended by itself with exit code 0: "),
    ):
        data = DataLoader(Odd(act), batch_size=2, num_workers=1)
        message = rf"{PLACE} \(samples .* never came: worker 0 \(pid.*{expected}"
        with pytest.raises(DataError, match=message):
            quiet(max_epochs=1, on_bad_batch="skip").fit(Regression(), data)
    for act, options, message in (
        (lacks_room, {}, "in worker 0.*: RuntimeError: unable.*Enlarge /dev/shm"),
        (lambda: time.sleep(1000), {"timeout": 2}, "timed out after 2 seconds"),
        (lambda: None, {"collate_fn": lambda _: threading.Lock()}, "exit code 1: .* batch could not be sent"),
    ):
        data = DataLoader(Odd(act), batch_size=2, num_workers=1, **options)
        with pytest.raises(DataError, match=message):
            quiet(max_epochs=1, on_bad_batch="skip").fit(Regression(), data)


@LINUX
@real
def test_a_worker_over_an_iterable_that_is_gone_or_raises_is_named_in_one_line() -> None:
    def raises(error: Exception) -> Callable[[], Any]:
        def act() -> Any:
            raise error

        return act

    raised = r"^the training data raised at batch 6 of epoch 0, in worker 0 \(pid \d+\): "
    gone = rf"{PLACE} never came: worker 0 \(pid \d+\) "
    for act, message, persistent in (
        (ends_by(signal.SIGKILL), gone + KILLED, False),
        (lambda: os._exit(3), f"{gone}ended by itself with exit code 3: ", True),
        (raises(KeyError("a\nkey")), rf"{raised}KeyError: 'a\\nkey'(\n|$)", False),
        (raises(ValueError("one\n  two\nthree")), rf"{raised}ValueError: one(\n|$)", False),
    ):
        data = DataLoader(OddStream(act), batch_size=2, num_workers=1, persistent_workers=persistent)
        with pytest.raises(DataError, match=message) as caught:
            quiet(max_epochs=1).fit(Regression(), data)
        assert not message.endswith("(\n|$)") or "Original Traceback" in str(caught.value.__cause__)


def test_what_torch_says_of_a_worker_is_explained() -> None:
    exited = RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost")
    assert "(pid 7) has ended by itself, or was killed. If" in str(note_on(exited))
    gone = RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly")
    assert "(pid(s) 7, 8) has ended by itself, or was killed. If" in str(note_on(gone))
    assert note_on(RuntimeError("else")) is None
    done = multiprocessing.get_context("fork").Process(target=os._exit, args=(0,))
    done.start()
    done.join()
    loader = SimpleNamespace(_workers=[done])
    assert all("exit code 0" in str(how_ended(loader, each)) for each in (exited, EOFError()))
    assert how_ended(loader, ValueError()) is None
    full = RuntimeError("unable to write to file </torch_7>: No space left on device in shared memory")
    assert "Enlarge /dev/shm" in str(lacks_shared_memory(full))
    assert lacks_shared_memory(RuntimeError("No space left on device")) is None


def ends(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            if "(zombie)" in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@LINUX
@needs_gloo
@real
def test_data_that_never_comes_is_named_by_hang_timeout() -> None:
    """Here or in a worker, which is ended too; and of several ranks the one that waits for it."""
    limit: dict[str, Any] = {"hang_timeout": 6.0, "run_dir": "."}
    ranks = {"strategy": "ddp", "devices": 2, "on_bad_batch": "skip", **limit}
    cases = {
        "here": {"workers": 0, "options": limit},
        "worker": {"options": limit},
        "ranks": {"options": ranks},
    }
    found = run_all(PROGRAM, {name: {"act": "sleep()", **each} for name, each in cases.items()})
    assert {name: each.code for name, each in found.items()} == dict.fromkeys(found, EXIT_HANG)
    worker = int(Path("worker/makes").read_text(encoding="utf-8"))
    makers = {"here": "Odd.__getitem__ or the collate_fn", "worker": f"worker 0 (pid {worker})"}
    for name, by in makers.items():
        text = "\n".join(found[name].errors)
        assert "no progress for 6 seconds (in training, after step 6, waiting for batch 6 of epoch" in text
        assert f"of the training data, which {by} makes" in text
        assert "waiting for batch 6" in Path(name, "hang-stacks.txt").read_text(encoding="utf-8")
    assert ends(worker), "it would sleep on"
    last = found["ranks"].errors[-1]
    place = "rank 0 is behind, in training, after step 3, waiting for batch 6 of epoch 0 of the training"
    for each in (place, "which worker 0 (pid ", "rank 1 waits in all_reduce"):
        assert each in last


@LINUX
@real
def test_a_worker_that_is_stuck_ends_with_a_parent_that_is_killed() -> None:
    process = Forked([PROGRAM, '{"act": "sleep()"}'], Path.cwd(), undisturbed())
    deadline = time.monotonic() + LIMIT
    while not Path("makes").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = int(Path("makes").read_text(encoding="utf-8"))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(LIMIT)  # the worker too would hold its output open
    assert process.returncode == -signal.SIGKILL
    assert ends(worker)


@LINUX
@real
def test_workers_end_with_a_program_that_fails() -> None:
    cases = {data: {"data": data, "workers": 2, "raises": True} for data in ("rows", "stream")}
    for ended in run_all(PROGRAM, cases).values():
        assert ended.code == 1
        assert ended.errors[-1].startswith("drivetrain: in training, after step 3"), ended.errors


@LINUX
@needs_gloo
@real
def test_the_last_line_names_the_rank_whose_worker_over_an_iterable_fails() -> None:
    options = {"data": "stream", "options": {"strategy": "ddp", "devices": 2}}
    cases = {
        "kill()": "was killed by signal SIGKILL: most often by the system",
        "raise ValueError('broken')": "ValueError: broken",
    }
    given = {act: {"act": f"if os.environ.get('RANK') == '1': {act}", **options} for act in cases}
    for act, ended in run_all(PROGRAM, given).items():
        assert ended.code == 1
        place = ("rank 1 failed first, in training, after step ", " of epoch 0", "worker 0 (pid ")
        assert [each for each in (*place, cases[act]) if each not in ended.errors[-1]] == []
