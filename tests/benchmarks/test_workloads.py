"""What is trained: the clock, the blocks, and data from which something can be learned."""

from __future__ import annotations

import pytest
import torch

from calls import CallCounter
from peers.hand import Hand
from rows import ROWS
from workloads import GPT, TINY, Clock, Job, tokens


def test_the_clock_hears_of_every_loss_and_blocks_leave_the_warm_up_out() -> None:
    job = Job(TINY, updates=6, block=3, warm_up=2, accumulation=2)
    assert len(job.data) == (2 + 6 + 1) * 2
    Hand().train(job)
    assert isinstance(job.clock, Clock)
    assert len(job.clock.times) == len(job.data)
    times = [float(at) for at in range(18)]
    times[10:] = [at + 8.0 for at in times[10:]]
    assert job.blocks(times) == [pytest.approx((18 - 4) / 3), pytest.approx(6 / 3)]
    job.clock.times = times
    assert job.seconds() == pytest.approx(2.0)


@pytest.mark.parametrize("row", [row for row in ROWS if row.verb == "train"], ids=lambda row: row.name)
def test_training_lowers_the_loss_of_every_work(row: object) -> None:
    work = row.work  # type: ignore[attr-defined]
    if work.name.startswith("GPT"):
        work = type(work)(
            "small", lambda: GPT(1, 16, 2, 16, 8), lambda n, rows: tokens(n, rows, 8, 16), 2, "adamw", 1e-2
        )
    job = Job(work, updates=20, warm_up=3)
    before = job.probed()
    Hand().train(job)
    assert job.probed() < before * 0.98


def test_calls_are_counted_between_losses_without_the_counters_own() -> None:
    counter = CallCounter()

    def work() -> None:
        abs(-1)
        len([])

    for _ in range(5):
        counter()
        work()
    counter()
    assert counter.per_update(1, 3) == {"python": 1, "c": 2}


def test_two_jobs_begin_alike() -> None:
    one, other = Job(TINY), Job(TINY)
    assert all(torch.equal(a, b) for a, b in zip(one.net.parameters(), other.net.parameters(), strict=True))
    assert torch.equal(one.data[3]["x"], other.data[3]["x"])
