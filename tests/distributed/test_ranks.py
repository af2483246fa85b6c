"""What processes do together: one outcome for all, also when it is an error."""

import pytest
import torch

from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.testing.distributed import run_distributed

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def fail():
    raise CheckpointError("no room")


def test_a_process_alone_waits_for_nobody():
    assert Ranks.of_job() == ALONE
    assert ALONE.all_gather("a") == ["a"]
    assert ALONE.first(lambda: "b") == "b"
    assert ALONE.together(lambda: "c") == ["c"]
    for act in (ALONE.first, ALONE.together):
        with pytest.raises(CheckpointError, match="no room"):
            act(fail)


@needs_gloo
def test_all_get_the_same():
    def act():
        ranks = Ranks.of_job()
        return (
            ranks.all_gather(ranks.rank * 10),
            ranks.first(lambda: f"from {ranks.rank}"),
            ranks.together(lambda: ranks.rank + 1),
        )

    found = run_distributed(act, world_size=3)
    assert found == [([0, 10, 20], "from 0", [1, 2, 3]) for rank in range(3)]


@needs_gloo
def test_of_processes_that_have_the_same_one_counts_and_all_hear():
    def act():
        job = Ranks.of_job()
        ranks = job.grouped(2)
        found = (
            (ranks.rank, ranks.size, job.grouped(1) is job),
            ranks.all_gather(job.rank),
            ranks.total([1.0, job.rank]),
            ranks.add(torch.tensor(10.0 + job.rank)).item(),
            ranks.first(lambda: f"from {job.rank}"),
            ranks.together(lambda: job.rank),
        )
        job.close()
        assert ranks.group is None
        return found

    for rank, found in enumerate(run_distributed(act, world_size=4)):
        group = rank // 2
        both = [0, 2]
        expected = ((group, 2, True), both, [2.0, 2.0], 22.0, "from 0", both)
        assert found == expected


@needs_gloo
def test_an_error_of_one_that_does_not_count_is_raised_by_all_too():
    def act():
        ranks = Ranks.of_job().grouped(2)
        with pytest.raises(CheckpointError, match="no room"):
            ranks.together(lambda: fail() if ranks.copy == 1 else None)
        return ranks.all_gather("still together")

    assert run_distributed(act) == [["still together"]] * 2


@needs_gloo
def test_an_error_of_one_is_raised_by_all():
    def act():
        ranks = Ranks.of_job()
        with pytest.raises(CheckpointError, match="no room") as caught:
            ranks.together(lambda: fail() if ranks.rank == 1 else None)
        notes = getattr(caught.value, "__notes__", [])
        with pytest.raises(CheckpointError, match="no room"):
            ranks.first(fail)
        return notes, ranks.all_gather("still together")

    notes = ["drivetrain: this happened on rank 1"]
    together = ["still together"] * 2
    assert run_distributed(act) == [(notes, together), ([], together)]


@needs_gloo
def test_an_error_that_cannot_be_sent_leaves_nobody_waiting():
    class OddError(Exception):
        def __init__(self, number, handle):
            super().__init__(number, handle)

    def act():
        ranks = Ranks.of_job()

        def fail():
            raise OddError(3, lambda: None)

        with pytest.raises(OddError if ranks.rank == 0 else RuntimeError, match="3"):
            ranks.together(lambda: fail() if ranks.rank == 0 else None)
        return ranks.all_gather(1)

    assert run_distributed(act) == [[1, 1], [1, 1]]


@needs_gloo
def test_a_part_of_the_job_adds_up_its_own():
    def act():
        rank = torch.distributed.get_rank()
        groups = [torch.distributed.new_group(each, backend="gloo") for each in ([0, 1], [2, 3])]
        ranks = Ranks(rank % 2, 2, groups[rank // 2])
        return ranks.add(torch.tensor(float(10**rank))).item(), ranks.total([10**rank])

    assert run_distributed(act, world_size=4) == [(11.0, [11.0])] * 2 + [(1100.0, [1100.0])] * 2
