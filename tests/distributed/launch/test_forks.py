"""Ranks of a program that cannot be run again: copies of it, which leave nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import distributed

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.failure.messages import TIMING
from drivetrain.distributed.group import disband, join, leave
from drivetrain.distributed.launch.forks import fork_ranks

pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available() or sys.platform != "linux", reason="needs gloo and a safe fork"
)


def rank() -> int:
    return int(os.environ["RANK"])


def summed(before=lambda: None) -> list[float]:
    """The sum over all ranks, by a function that can do something else before."""
    distributed.init_process_group("gloo")
    try:
        before()
        total = torch.tensor([rank() + 1.0])
        distributed.all_reduce(total)
        return [*total.tolist(), torch.get_num_threads()]
    finally:
        distributed.destroy_process_group()


def test_rank_0s_result_comes_back_and_it_can_be_called_again() -> None:
    # What a program has defined itself, as a notebook's cells do, is there in every rank.
    assert fork_ranks(lambda: summed(), 2) == [3.0, 1]
    assert fork_ranks(lambda: summed(), 3) == [6.0, 1]


def test_the_error_of_a_copy_is_raised_here_with_its_traceback() -> None:
    def fails_on_rank_1():
        if rank() == 1:
            raise LookupError("no such column")

    with pytest.raises(RankFailure, match="rank 1 failed first: LookupError: no such column") as caught:
        fork_ranks(lambda: summed(fails_on_rank_1), 2)
    assert "in fails_on_rank_1" in str(caught.value.__cause__)


def test_the_error_of_this_process_is_raised_as_it_is() -> None:
    def fails_on_rank_0():
        if rank() == 0:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fork_ranks(lambda: summed(fails_on_rank_0), 2)


def test_a_copy_that_is_killed_is_named() -> None:
    def dies():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="rank 1 failed first: it was killed by SIGKILL"):
        fork_ranks(lambda: summed(dies), 2)


def test_a_copy_that_stops_answering_does_not_take_this_process_with_it() -> None:
    def stops():
        with FailureChannel(
            rank(), 2, timing=replace(TIMING.scaled(0.3), silence=0.5), describe=lambda: "update 7"
        ):
            if rank() == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            distributed.barrier()

    with pytest.raises(RankFailure, match="rank 1 failed first, last heard of at update 7: it is stopped"):
        fork_ranks(lambda: summed(stops), 2)


def _raise() -> None:
    raise LookupError("no such column")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (_raise, "rank 1 failed first: LookupError: no such column"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 failed first: it was killed by SIGKILL"),
    ],
)
def test_a_copy_whose_workers_outlive_it_does_not_take_this_process_with_it(end, told: str) -> None:
    def fails():
        member = join(2, "cpu")
        try:
            with FailureChannel(rank(), 2, timing=replace(TIMING.scaled(0.3), silence=0.5)):
                if rank() == 1:
                    with warnings.catch_warnings(action="ignore"):  # of a copy of a process with threads
                        pid = os.fork()
                    if pid == 0:
                        time.sleep(3)  # as a loader's worker does, which holds a copy of all that is open
                        os._exit(0)
                    end()
                distributed.all_reduce(torch.ones(1))
        finally:
            leave(member)
            disband()

    with pytest.raises(RankFailure, match=told):
        fork_ranks(fails, 2)
    assert fork_ranks(lambda: summed(), 2) == [3.0, 1]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: 1 / 0, "rank 1 failed first: ZeroDivisionError: division by zero"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "rank 1 failed first, before the process group was formed: it was killed by SIGKILL",
        ),
        (lambda: os._exit(0), "rank 1 ended with exit code 0 before the process group was formed"),
    ],
)
def test_a_copy_that_ends_before_it_joins_is_not_waited_for(end, told: str) -> None:
    def joins():
        if rank() == 1:
            end()
        try:
            leave(join(2, "cpu"))
        finally:
            disband()

    started = time.monotonic()
    with pytest.raises(RankFailure, match=told):
        fork_ranks(joins, 2)
    assert time.monotonic() - started < 60, "torch waits for minutes"


def test_an_interrupted_call_ends_the_copies() -> None:
    def interrupts():
        if rank() == 0:
            raise KeyboardInterrupt
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        fork_ranks(interrupts, 2)


def test_a_copy_does_not_read_what_is_typed_nor_print_what_was_printed(capfd) -> None:
    sys.stdout.write("once")

    def reads():
        return 0 if os.readlink("/proc/self/fd/0") == os.devnull or rank() == 0 else 1 / 0

    fork_ranks(reads, 2)
    sys.stdout.flush()
    assert capfd.readouterr().out == "once"


def test_a_rank_has_no_ranks_of_its_own(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StrategyError, match="one of 2 already"):
        fork_ranks(summed, 2)


def test_a_process_with_cuda_in_use_is_not_copied(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(StrategyError, match=r"CUDA is in use in this process.*start it as a script"):
        fork_ranks(summed, 2)
