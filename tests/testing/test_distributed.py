"""Real processes for tests: values come back by rank, and no failure of theirs is lost or waited for."""

import multiprocessing
import os
import time

import pytest
import torch

from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def no_process_is_left():  # the pool of ranks, which other tests use, may be there before
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
    with pytest.raises(RuntimeError, match=r"rank 0 failed:\nit ended with exit code 7"):
        run_distributed(dies)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] have not ended within 1 seconds"):
        run_distributed(hangs, timeout=1)
