"""Workers outlive what ends their run in order; one that dies troubles nobody but who reads its batches."""

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import LIMIT, run
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader

from drivetrain import DataError, LambdaCallback
from drivetrain.core.errors import EXIT_REQUEUE

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="the system tells of no child's end"),
    pytest.mark.real("workers get signals and are killed"),
]
PROGRAMS = Path(__file__).parents[1] / "programs"


class Dies(Dataset[tuple[Tensor, Tensor]]):  # a worker that makes a certain sample is killed
    batch_size = 2

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.ones(1)


class DyingStream(IterableDataset[tuple[Tensor, Tensor]]):  # the same, as a stream
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return map(Dies(7).__getitem__, range(8))


def wait_for_a_death() -> None:  # until the only worker has died, which torch would raise here
    deadline = time.monotonic() + LIMIT
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def torch_looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers that are gone, which it does every five seconds of a wait."""
    looks = dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(looks, "__defaults__", (0.2,))


class Waiting(Regression):  # waits for the death of a worker where nobody expects it
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def configure_optimizers(self) -> Any:
        if self.where == "set-up":
            wait_for_a_death()
        return super().configure_optimizers()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if self.where == "step":
            wait_for_a_death()
        return super().loss(outputs, batch)


@pytest.mark.parametrize("data", ["rows", "stream"])
def test_a_worker_that_dies_is_a_fault_of_the_data_wherever_the_run_stands(data: str) -> None:
    """torch raises its end wherever the main thread is; here that is heard of where its batch is read."""
    for where in ("set-up", "step") if data == "rows" else ("step",):
        given = Dies(7) if data == "rows" else DataLoader(DyingStream(), 2, num_workers=1, prefetch_factor=4)
        trainer = quiet(max_epochs=1, num_workers=int(data == "rows"), limit_train_batches=4)
        with pytest.raises(DataError, match=r"the training data .*worker"):
            trainer.fit(Waiting(where), given)
        assert not multiprocessing.active_children()


def test_workers_of_a_loader_over_an_iterable_end_with_the_run() -> None:
    """Also those that stay for all epochs; another run starts others."""
    for persistent in (False, True):
        loader = DataLoader(Stream(), batch_size=4, num_workers=1, persistent_workers=persistent)
        for _ in range(2):
            result = quiet(max_epochs=2).fit(Regression(), loader)
            assert result.progress.steps == 10
            assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_workers_also_where_its_traceback_is_kept() -> None:
    ended = run(str(PROGRAMS / "interrupted.py"))
    assert (ended.code, ended.errors) == (0, [])


def test_a_worker_that_is_stuck_is_killed_once_its_loader_ends() -> None:
    ended = run(str(PROGRAMS / "odd.py"), act="stick()", preempted=True)
    assert ended.code == EXIT_REQUEUE, ended.errors


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(20):
            yield torch.ones(4), torch.ones(1)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4), torch.ones(1)


@pytest.mark.parametrize("data", [Rows, Stream])
def test_a_signal_to_every_process_ends_no_worker(data: Any) -> None:
    def to_workers(run: Any) -> None:
        for each in multiprocessing.active_children():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(each.pid or 0, number)
                sent.append(number)

    sent: list[int] = []
    hooks: Any = {"on_step_end": to_workers, "on_evaluation_step_end": to_workers}
    result = quiet(max_epochs=2, callbacks=[LambdaCallback(**hooks)]).fit(
        Regression(), *(DataLoader(data(), batch_size=4, num_workers=2) for _ in range(2))
    )
    assert result.progress.steps == 20
    assert len(sent) >= 80
    assert multiprocessing.active_children() == []


class Garbage:  # refers to itself, and notes the process that frees it
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        with Path("freed").open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")


class Collects(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="workers are no copies")
def test_no_worker_frees_the_garbage_of_the_process_that_it_was_forked_from() -> None:
    """The destructor of a process group waits for threads that a forked process does not have."""
    loader = DataLoader(Collects(), batch_size=4, num_workers=1)
    gc.disable()
    try:
        Garbage()
        result = quiet(max_steps=2).fit(Regression(), loader)
    finally:
        gc.enable()
    assert result.progress.steps == 2
    gc.collect()
    assert Path("freed").read_text(encoding="utf-8").split() == [str(os.getpid())]
