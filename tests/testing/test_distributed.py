"""Real processes for tests: values come back by rank, and no failure of theirs is lost or waited for."""

import gc
import multiprocessing
import os
import sys
import time

import pytest
import torch

from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def no_process_is_left():
    """The pool of ranks, which other tests use, may be there before."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def test_each_rank_returns_its_own_value():
    def act(offset):
        rank = torch.distributed.get_rank()
        total = torch.tensor(float(rank))
        torch.distributed.all_reduce(total)
        tensors = {"weights": [torch.full((3,), float(rank)), (torch.ones(2), rank)]}
        return offset + rank, total.item(), os.environ["WORLD_SIZE"], tensors

    for rank, (*values, tensors) in enumerate(run_distributed(act, 10, world_size=3)):
        assert values == [10 + rank, 3.0, "3"]
        assert tensors["weights"][0].tolist() == [rank] * 3  # by value
        assert tensors["weights"][1][0].tolist() == [1, 1]
    assert "RANK" not in os.environ


def test_a_failure_names_its_rank_and_a_process_that_dies_or_hangs_is_not_waited_for(tmp_path):
    def raises():
        if torch.distributed.get_rank() == 1:
            raise ValueError("the second of two")
        torch.distributed.barrier()

    def dies():
        # Once the other is there: what it would say of a connection that breaks as it joins counts more.
        if torch.distributed.get_rank() == 0:
            while not there.exists():
                time.sleep(0.01)
            os._exit(7)
        there.touch()
        time.sleep(3600)

    def hangs():
        if torch.distributed.get_rank() == 1:
            time.sleep(3600)

    there = tmp_path / "there"
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(?s:.*)in raises(?s:.*)ValueError: the second"):
        run_distributed(raises)
    with pytest.raises(RuntimeError, match=r"rank 0 failed:\nit died with exit code 7"):
        run_distributed(dies)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] have not ended within 1 seconds"):
        run_distributed(hangs, timeout=1)


class Garbage:
    """Refers to itself, and notes the process that frees it."""

    def __init__(self, note):
        self.itself, self.note = self, note

    def __del__(self):
        with self.note.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")


def _collects():
    """Collect garbage as a copy begins, as the interpreter itself may do there."""
    if _collecting and gc.isenabled():
        gc.collect()


_collecting = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collects)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are no copies")
def test_no_process_frees_the_garbage_of_the_one_that_starts_it(tmp_path):
    """The destructor of a process group waits for threads that a forked process does not have."""
    note = tmp_path / "freed"
    was, _ = gc.get_threshold(), gc.set_threshold(0)  # nothing is collected but where this test asks for it
    _collecting.append(True)
    try:
        Garbage(note)
        run_distributed(gc.collect)
    finally:
        _collecting.clear()
        gc.set_threshold(*was)
    gc.collect()
    assert note.read_text(encoding="utf-8").split() == [str(os.getpid())]
