"""Real processes for tests: values come back by rank, and no failure of theirs is lost or waited for."""

import multiprocessing
import os
import time

import pytest
import torch

from drivetrain.testing.distributed import run_distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def test_each_rank_returns_its_own_value():
    def act(offset):
        total = torch.tensor(float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(total)
        return offset + torch.distributed.get_rank(), total.item(), os.environ["WORLD_SIZE"]

    assert run_distributed(act, 10, world_size=3) == [(10, 3.0, "3"), (11, 3.0, "3"), (12, 3.0, "3")]
    assert "RANK" not in os.environ
    assert multiprocessing.active_children() == []


def test_an_error_names_its_rank_and_has_its_traceback():
    def act():
        if torch.distributed.get_rank() == 1:
            raise ValueError("the second of two")
        torch.distributed.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1 failed:(?s:.*)in act(?s:.*)ValueError: the second"):
        run_distributed(act)
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_is_not_waited_for(tmp_path):
    def act():
        # Once the other is there: what it would say of a connection that breaks as it joins counts more.
        if torch.distributed.get_rank() == 0:
            while not there.exists():
                time.sleep(0.01)
            os._exit(7)
        there.touch()
        time.sleep(60)

    there = tmp_path / "there"
    with pytest.raises(RuntimeError, match=r"rank 0 failed:\nit died with exit code 7"):
        run_distributed(act)
    assert multiprocessing.active_children() == []


def test_processes_that_hang_are_ended():
    def act():
        if torch.distributed.get_rank() == 1:
            time.sleep(60)

    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] have not ended within 2 seconds"):
        run_distributed(act, timeout=2)
    assert multiprocessing.active_children() == []
