"""What is said of a loader's worker that is gone, and of data that never comes: real signals, real sleeps."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forked import run_forked
from tests.support.tasks import FEATURES, Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import DataError
from drivetrain.data.workers import signals as worker_signals
from drivetrain.data.workers.ends import note_on
from drivetrain.distributed.failure.watchdog import EXIT_HANG

ROOT = Path(__file__).parents[3]

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
FORKS = pytest.mark.skipif(sys.platform != "linux", reason="forks")


def ends_by(number: int) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), number)


class Odd(Dataset[Any]):
    """Something happens at the 13th of 24 samples."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        made = self.act() if index == 12 else None
        return (torch.full((FEATURES,), float(index)), torch.zeros(1)) if made is None else made


class OddStream(IterableDataset[Any]):
    """Something happens at the 13th of 24 samples of each worker."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __iter__(self) -> Iterator[Any]:
        rows = Odd(self.act)
        return (rows[index] for index in range(len(rows)))


class Busy(Regression):
    """Three seconds for a step, in which a signal's handler can run."""

    def training_step(self, batch: Any) -> Tensor:
        for _ in range(300):
            time.sleep(0.01)
        return self.loss(self(batch[0]), batch)


@POSIX
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (ends_by(signal.SIGKILL), r"was killed by signal SIGKILL: .*lack of memory.*fewer num_workers"),
        (ends_by(signal.SIGBUS), r"was killed by signal SIGBUS: the shared memory.*/dev/shm has \d+ of"),
        (lambda: os._exit(3), r"ended by itself with exit code 3: "),
        (lambda: lambda: None, r"ended by itself with exit code 1: "),
    ],
    ids=["SIGKILL", "SIGBUS", "exit", "a batch that cannot be sent"],
)
def test_a_worker_that_is_gone_is_named_with_what_helps(act: Callable[[], Any], expected: str) -> None:
    """And is no bad batch, which could be left out."""
    data = DataLoader(
        Odd(act), batch_size=2, num_workers=1, collate_fn=list if expected[-3:] == "1: " else None
    )
    place = (
        r"training data cannot be read on; batch \d of epoch 0 \(samples .* was waited for: worker 0 \(pid"
    )
    with pytest.raises(DataError, match=f"{place}.*{expected}"):
        quiet(max_epochs=1, on_bad_batch="skip").fit(Pairs(), data)


@POSIX
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (ends_by(signal.SIGKILL), r"was killed by signal SIGKILL: .*lack of memory.*fewer num_workers"),
        (lambda: os._exit(3), r"ended by itself with exit code 3: "),
    ],
    ids=["SIGKILL", "exit"],
)
@pytest.mark.parametrize("persistent", [False, True])
def test_so_is_one_of_a_loader_over_an_iterable(
    act: Callable[[], Any], expected: str, persistent: bool
) -> None:
    data = DataLoader(OddStream(act), batch_size=2, num_workers=1, persistent_workers=persistent)
    place = r"training data cannot be read on; batch \d of epoch 0 was waited for: worker 0 \(pid \d+\) "
    with pytest.raises(DataError, match=f"{place}{expected}"):
        quiet(max_epochs=1).fit(Regression(), data)
    assert signal.getsignal(signal.SIGCHLD) is not worker_signals._handle_sigchld


@FORKS
@pytest.mark.full
@pytest.mark.parametrize("data", [Odd, OddStream])
def test_a_worker_that_hangs_ends_the_run_after_the_loaders_timeout(data: Any) -> None:
    loader = DataLoader(data(lambda: time.sleep(600)), batch_size=2, num_workers=1, timeout=1)
    message = r"training data raised at batch 6 of epoch 0.*timed out after 1 seconds"
    with pytest.raises(DataError, match=message):
        quiet(max_epochs=1).fit(Regression(), loader)


def broken() -> None:
    raise KeyError("a\nkey")


def broken_with_lines() -> None:
    raise ValueError("one\n  two\nthree")


@pytest.mark.parametrize(
    ("act", "what"),
    [(broken, r"KeyError: 'a\\nkey'"), (broken_with_lines, "ValueError: one")],
    ids=["an error", "one of several lines"],
)
def test_what_is_raised_in_a_worker_over_an_iterable_is_told_in_one_line(
    act: Callable[[], Any], what: str
) -> None:
    data = DataLoader(OddStream(act), batch_size=2, num_workers=1)
    message = rf"^the training data raised at batch 6 of epoch 0, in worker 0 \(pid \d+\): {what}(\n|$)"
    with pytest.raises(DataError, match=message) as caught:
        quiet(max_epochs=1).fit(Regression(), data)
    assert "Original Traceback" in str(caught.value.__cause__)


def test_what_torch_says_of_a_worker_is_explained() -> None:
    """In each of its three ways; the last does not say how, unless the system has told it first."""
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert "(pid 7) was killed by signal SIGKILL: most often by the system" in str(note_on(killed))
    exited = RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost")
    assert "(pid 7) has ended by itself, or was killed. If" in str(note_on(exited))
    gone = RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly")
    assert "(pid(s) 7, 8) has ended by itself, or was killed. If" in str(note_on(gone))
    gone.__cause__ = killed
    assert "was killed by signal SIGKILL: most often" in str(note_on(gone))
    assert note_on(RuntimeError("else")) is None


class Pairs(Regression):
    """Over a list of samples."""

    def training_step(self, batch: Any) -> Tensor:
        features, target = batch if isinstance(batch[0], Tensor) else batch[0]
        return self.loss(self(features), (features, target))

    def loss_weight(self, batch: Any) -> int:
        return 1


@POSIX
def test_one_that_is_killed_while_a_step_is_computed_is_named_too() -> None:
    """torch raises its end wherever the main thread is; here that is heard of where its batch is read."""

    def killed() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    for data in (Odd(killed), OddStream(killed)):
        loader = DataLoader(data, batch_size=6, num_workers=1)
        with pytest.raises(DataError, match=r"worker 0 \(pid \d+\) was killed by signal SIGKILL: most often"):
            quiet(max_epochs=1).fit(Busy(), loader)


def forked(act: Callable[[], Any], told: Path) -> int:
    """The exit code of a copy of this process that does something, with its standard error in a file."""
    pid = os.fork()
    if pid == 0:
        with told.open("wb") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_there(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


@FORKS
@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_never_comes_is_named_by_the_watchdog(workers: int, tmp_path: Path) -> None:
    told, makes = tmp_path / "told", tmp_path / "makes"

    def sleep() -> None:
        makes.write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    def fit() -> None:
        data = DataLoader(Odd(sleep), batch_size=2, num_workers=workers)
        quiet(max_epochs=1, hang_timeout=5.0, run_dir=tmp_path).fit(Regression(), data)

    assert forked(fit, told) == EXIT_HANG
    text = told.read_text(encoding="utf-8")
    assert "no progress for 5 seconds (in training, after update 6, waiting for batch 6 of epoch 0" in text
    by = f"worker 0 (pid {makes.read_text()}) makes" if workers else "Odd.__getitem__ or the collate_fn makes"
    assert f"of the training data, which {by}" in text
    assert "waiting for batch 6" in (tmp_path / "hang-stacks.txt").read_text(encoding="utf-8")
    if workers:  # which would sleep on
        deadline = time.monotonic() + 30
        while is_there(int(makes.read_text())) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_there(int(makes.read_text()))


@FORKS
def test_a_worker_that_is_stuck_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    makes = tmp_path / "makes"

    def sleep() -> None:
        makes.write_text(f"{os.getpid()} ", encoding="utf-8")
        time.sleep(600)

    pid = os.fork()
    if pid == 0:
        quiet(max_epochs=1).fit(Regression(), DataLoader(Odd(sleep), batch_size=2, num_workers=1))
    deadline = time.monotonic() + 30
    while not (makes.exists() and " " in makes.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = int(makes.read_text())
    assert is_there(worker)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 30
    while is_there(worker) and time.monotonic() < deadline:
        time.sleep(0.01)
    if is_there(worker):
        os.kill(worker, signal.SIGKILL)
        pytest.fail("the worker was left behind")


PROGRAM = """
import os, signal, sys, time
import torch
from tests.data.workers.test_ends import Odd, OddStream
from tests.support.tasks import Regression, quiet
from torch.utils.data import DataLoader

def act():
    ACT

if __name__ == "__main__":
    data = DataLoader(DATA(act), batch_size=2, num_workers=1)
    quiet(max_epochs=1, OPTIONS).fit(Regression(), data)
"""


def run(
    directory: Path, act: str, options: str, *before: str, data: str = "Odd"
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("ACT", act).replace("OPTIONS", options).replace("DATA", data)
    (directory / "program.py").write_text(program, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sys.path[:2], str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    if not before:
        return run_forked(["program.py"], directory, environment, timeout=240)
    return subprocess.run(
        [*before, sys.executable, "program.py"],
        cwd=directory,
        env=environment,
        capture_output=True,  # which a process that was left behind would hold open
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs a /dev/shm")
def test_a_lack_of_shared_memory_is_named_and_is_no_bad_batch(tmp_path: Path) -> None:
    small = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*small, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    done = run(tmp_path, "return torch.zeros(5_000_000), torch.zeros(1)", 'on_bad_batch="skip"', *small)
    assert done.returncode == 1
    assert "in worker 0 (pid " in done.stderr
    assert "Enlarge /dev/shm" in done.stderr
    assert "of 8 MiB free now" in done.stderr


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_of_several_ranks_the_one_that_waits_for_data_is_named(tmp_path: Path) -> None:
    """Sample 12 is the first of rank 0 in the fourth round; rank 1 waits for it in a collective."""
    done = run(
        tmp_path, "time.sleep(600)", 'on_bad_batch="skip", hang_timeout=4.0, strategy="ddp", devices=2'
    )
    assert done.returncode == EXIT_HANG
    last = done.stderr.splitlines()[-1]
    assert (
        "rank 0 is behind, in training, after update 3, waiting for batch 6 of epoch 0 of the training"
        in last
    )
    assert "which worker 0 (pid " in last
    assert "rank 1 waits in all_reduce" in last


@POSIX
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("act", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal SIGKILL: most often by the system"),
        ("raise ValueError('broken')", "ValueError: broken"),
    ],
)
def test_the_last_line_names_the_rank_whose_worker_over_an_iterable_fails(
    act: str, what: str, tmp_path: Path
) -> None:
    done = run(
        tmp_path,
        f"if os.environ.get('RANK') == '1': {act}",
        'strategy="ddp", devices=2',
        data="OddStream",
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "rank 1 failed first, in training, after update " in last
    assert " of epoch 0" in last
    assert "worker 0 (pid " in last
    assert what in last
