"""A run that not all ranks begin says so, instead of waiting in silence."""

from __future__ import annotations

import re

import pytest
import torch
from tests.support.failing import Ended

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

PROGRAM = """
import os, sys, time
from drivetrain.distributed.group import join, leave
from drivetrain.distributed.launch.programs import ensure_ranks

rank = ensure_ranks(2).rank

def run():
    member = join(2, "cpu")
    member.ranks.all_gather(rank)  # as every run does; a group that one rank closes at once may not form
    leave(member)

run()
{after}
sys.stdout.write("ended")
"""


def program(after: str) -> pytest.MarkDecorator:
    """Two ranks, and what they do after a run."""
    return pytest.mark.program(PROGRAM.format(after=after))


ADVICE = "and this run needs all ranks. Call fit, validate, test and predict on all ranks, not under `if rank"


@pytest.mark.parametrize(
    ("told", "last"),
    [
        pytest.param(
            "rank 1 (has ended|ended with exit code 0)", "RankFailure", marks=program("if rank == 0: run()")
        ),
        pytest.param("rank 0 has ended", "rank 1 failed: it ended", marks=program("if rank == 1: run()")),
        pytest.param(
            "rank 1 ended with exit code 0",
            "RankFailure",
            marks=program("if rank == 0: run()\nsys.stdout.flush(); os._exit(0)"),
        ),
    ],
)
def test_a_rank_that_has_ended_is_named_with_what_to_do(ended: Ended, told: str, last: str) -> None:
    assert ended.code == 1
    assert any(ADVICE in each and re.search(told, each) for each in ended.errors), ended.errors
    assert last in ended.errors[-1]


@program("if rank == 1: time.sleep(12)\nrun()")
def test_a_rank_that_is_late_is_waited_for_and_named(ended: Ended) -> None:
    assert (ended.code, ended.out) == (0, "endedended")
    told = "rank 0 has waited 10 s for rank 1 to begin the same run"
    assert sum(told in each for each in ended.errors) == 1
