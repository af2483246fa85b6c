"""A stop that one rank asks for: all ranks stop after the same step, for the same reason."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, CheckpointConfig, LambdaCallback
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS
from drivetrain.core.errors import RankFailure
from drivetrain.distributed.stopping import Poll, Stopping
from drivetrain.strategies.ddp import DDP
from drivetrain.testing.distributed import run_distributed

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
HOOKS = ["on_step_start", "on_step_end", "on_log", "on_evaluation_end", "on_epoch_start", "on_epoch_end"]
HOOKS += ["on_save"]


class Asks(Callback):  # asks to stop in a hook, once a step is reached, on some ranks
    def __init__(self, hook: str, step: int, ranks: set[int]) -> None:
        self.step, self.ranks = step, ranks
        self.asked_at: int | None = None
        setattr(self, hook, self.decide)

    def decide(self, run: Any) -> None:
        rank = run.engine.strategy.rank
        if run.progress.steps >= self.step and rank in self.ranks and self.asked_at is None:
            self.asked_at = run.progress.steps
            run.stop(f"rank {rank} wanted it")


def fit(asks: Callback, world_size: int = 1, **options: Any) -> Any:
    strategy = {} if world_size == 1 else {"strategy": DDP(world_size=world_size), "devices": world_size}
    given = {"max_epochs": 3, "validate_every": "3 steps", "log_every": "2 steps", **strategy, **options}
    return quiet(callbacks=[asks], **given).fit(Regression(), pairs(24), pairs(8))


def ended(world_size: int, hook: str, step: int, ranks: set[int], **options: Any) -> Any:
    asks = Asks(hook, step, ranks)
    result = fit(asks, world_size, **options)
    return result.progress.steps, result.stop_reason, asks.asked_at


def test_a_signal_asks_for_no_restart_once_another_ranks_death_is_known() -> None:
    """A launcher signals the ranks that are left; this rank may hear of the death a moment later."""
    failure = RankFailure("rank 1 was killed")
    for signalled_first, is_death, code in ((False, True, None), (True, True, None), (True, False, 75)):
        stopping = Stopping()
        stopping.signals = {"SIGTERM": 75}
        if signalled_first:
            stopping.ask("SIGTERM")
        stopping.abandon(failure, is_death)
        stopping.ask("SIGTERM")
        assert stopping.exit_code == code
        assert (stopping.asked is None) == (not signalled_first)


def test_the_first_boundary_that_nobody_has_passed_is_taken_once_all_have_told() -> None:
    poll = Poll(3)
    assert poll.open(2, 0, "two")
    assert not poll.open(1, 0, "one")
    poll.note(0, 7)
    poll.note(1, 6, "one")
    assert poll.decision() is None
    poll.leave(2, 6)  # a goodbye counts, too, and in later rounds
    assert poll.decision() == {"at": 8, "reason": "one"}
    assert poll.decision() is None
    assert not poll.open(1, 0, None)  # it comes to the first meeting yet
    assert poll.open(1, 1, None)
    poll.note(0, 8)
    poll.note(1, 9)
    assert poll.decision() == {"at": 10, "reason": None}


def test_a_rank_that_waits_for_its_own_answer_can_still_stop_where_it_waits() -> None:
    stopping = Stopping()
    for number in (0, 1):
        assert not stopping.meets()
        stopping.passed = 4
        stopping.want_meeting()
        stopping.passed = 5  # it has come to the boundary, and waits there
        assert stopping.hold(number) == {"passed": 4, "asked": None}
        stopping.set_answer(6, None)
        assert not stopping.meets()
        stopping.passed = 6
        assert stopping.meets()


def test_a_failure_ends_the_wait() -> None:
    stopping = Stopping()
    stopping.want_meeting()
    stopping.abandon(RankFailure("rank 1 failed first"))
    with pytest.raises(RankFailure, match="rank 1 failed first"):
        stopping.meets()


@needs_gloo
@pytest.mark.heavy("eight trainings of two ranks")
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.landing)])
def test_wherever_and_whoever_asks_for_a_stop_all_ranks_agree(world_size: int) -> None:
    draw = random.Random(world_size)
    cases = []
    for _ in range(8):
        ranks = set(draw.sample(range(world_size), draw.choice([1, 1, 2])))
        cases.append((draw.choice(HOOKS), draw.randrange(1, 10), ranks))

    def work() -> list[Any]:
        return [ended(world_size, *case) for case in cases]

    found = on_two_ranks(work) if world_size == 2 else run_distributed(work, world_size=world_size)
    for case, *outcomes in zip(cases, *found, strict=True):
        assert len({each[:2] for each in outcomes}) == 1, (case, outcomes)
        steps, reason, _ = outcomes[0]
        assert reason in {f"rank {rank} wanted it" for rank in case[2]}, (case, outcomes)
        asked = min(each[2] for each in outcomes if each[2] is not None)
        assert asked <= steps <= asked + 2, (case, outcomes)


@needs_gloo
def test_the_last_checkpoint_is_that_of_the_agreed_step(tmp_path: Path) -> None:
    def fits(hook: str) -> Any:
        saves = CheckpointConfig(every="4 steps", by=None)
        options = {"run_dir": tmp_path / hook, "checkpoint": saves, "validate_every": None}
        return ended(2, hook, 6, {1}, **options)

    hooks = ("on_step_end", "on_checkpoint_saved")
    for hook, *found in zip(hooks, *on_two_ranks(lambda: [fits(each) for each in hooks]), strict=True):
        assert len({each[:2] for each in found}) == 1, found
        entries = read_index(str(tmp_path / hook / CHECKPOINTS))
        assert entries is not None
        assert max(each.step for each in entries) == found[0][0]


@needs_gloo
@pytest.mark.parametrize("ranks", [{1}, {0, 1}])
def test_a_stop_in_the_body_of_a_loop_is_every_ranks(ranks: set[int]) -> None:
    def looped() -> tuple[int, list[int]]:
        runs: list[Any] = []
        options = {"strategy": DDP(world_size=2), "devices": 2, "gradient_accumulation_steps": 3}
        trainer = quiet(max_epochs=4, callbacks=[LambdaCallback(on_fit_start=runs.append)], **options)
        seen = []
        for result in trainer.steps(Regression(), pairs(24)):
            seen.append(result.step)
            if result.step == 4 and runs[0].engine.strategy.rank in ranks:
                runs[0].stop("enough")
        return runs[0].progress.steps, seen

    one, other = on_two_ranks(looped)
    assert one == other
    steps, seen = one
    assert seen == list(range(steps))
    assert steps == 5 if ranks == {0, 1} else 5 <= steps <= 6
