"""Workers that die, or are left amid their work, trouble nobody but who reads their batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from tests.support.indexed import Augmented, batches, source
from tests.support.tasks import Regression, quiet
from torch import Tensor
from torch.utils.data import Dataset

from drivetrain import DataError
from drivetrain.data import worker_signals
from drivetrain.data.workers import Following

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="the system tells of no child's end")


class Dies(Dataset[tuple[Tensor, Tensor]]):
    batch_size = 2

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4), torch.ones(1)


def wait_for_a_death() -> None:
    """Until torch has heard of a worker's end, which it would raise here."""
    deadline = time.monotonic() + 30
    while not worker_signals.KEPT and time.monotonic() < deadline:
        time.sleep(0.01)


class Waiting(Regression):
    """Waits for the death of a worker where nobody expects it."""

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


@pytest.mark.parametrize("where", ["set-up", "step"])
def test_a_worker_that_dies_is_a_fault_of_the_data_wherever_the_run_stands(where: str) -> None:
    with pytest.raises(DataError, match=r"the training data .*worker"):
        quiet(max_epochs=1, num_workers=1, limit_train_batches=4).fit(Waiting(where), Dies(7))
    assert not worker_signals.KEPT
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_unread_is_forgotten_with_the_rest() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    read = source(Dies(0), shuffle=False, workers=1, persistent_workers=True)
    for _ in range(2):
        read.begin(0, 0, None, Following())
        wait_for_a_death()
        assert worker_signals.KEPT
        assert signal.getsignal(signal.SIGCHLD) is not before
        read.close()
        assert not worker_signals.KEPT
        assert signal.getsignal(signal.SIGCHLD) is before


def test_other_loaders_workers_are_heard_of_as_ever() -> None:
    read = source(workers=1, persistent_workers=True)
    first = read.batches(0, 0)
    next(first)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(torch.utils.data.DataLoader(Dies(1), num_workers=1))
    assert len(list(first)) == len(batches(source())) - 1
    read.close()


def test_an_iterator_that_is_dropped_is_listened_for_no_longer() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    iterator = iter(torch.utils.data.DataLoader(Augmented(), num_workers=1))
    worker_signals.listen(iterator)
    assert signal.getsignal(signal.SIGCHLD) is not before
    del iterator
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGCHLD) is before


class Slow(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_an_interrupt_ends_the_workers_also_where_its_traceback_is_kept() -> None:
    read = source(Slow(), workers=2, persistent_workers=True)
    given = read.batches(0, 0)
    next(given)
    waiting = threading.Event()

    def interrupt() -> None:
        waiting.wait()
        while worker_signals.Waits.iterator is None:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def read_on() -> None:
        waiting.set()
        for epoch in range(100):
            batches(read, epoch)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        read_on()
    thread.join()
    assert caught.tb is not None  # and holds on to everything
    assert not multiprocessing.active_children()
    assert len(batches(read, 1)) == len(batches(source(), 1))
    read.close()
