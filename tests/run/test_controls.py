"""What hooks may ask a fit for: a checkpoint, a validation, the end of an epoch; and its least length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch.utils.data import DataLoader

from drivetrain import Callback, CheckpointConfig, EarlyStopping, LambdaCallback, Run

FAR = CheckpointConfig(every="1000 steps", keep_last=9, best=0, by=None)


class Asks(Callback):  # asks for something after a step, in a hook, and notes what is called from then on
    def __init__(self, hook: str, steps: set[int], ask: Callable[[Run], Any]) -> None:
        self.epochs, self.validated, self.saved, self.logged = ([], [], [], [])  # type: Any
        lists = {"on_epoch_end": self.epochs, "on_evaluation_start": self.validated}
        lists |= {"on_checkpoint_saved": self.saved, "on_log": self.logged}
        for name, noted in lists.items():
            setattr(self, name, lambda run, noted=noted: noted.append(run.progress.steps))
        setattr(self, hook, lambda run: ask(run) if run.progress.steps in steps else None)


def fit(asks: Callback, validation: Any = None, **options: Any) -> Any:
    trainer = quiet(callbacks=[asks], **{"max_epochs": 1, **options})
    return trainer.fit(Regression(), pairs(12), validation)


@pytest.mark.parametrize("hook", ["on_step_end", "on_log"])
def test_run_save_saves_at_the_end_of_its_step(tmp_path: Path, hook: str) -> None:
    asks = Asks(hook, {2, 3}, Run.save)
    fit(asks, run_dir=tmp_path, checkpoint=FAR, log_every=1)
    assert asks.saved == [2, 3, 6]
    assert (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").exists()


def test_run_validate_and_log_now_are_done_in_their_step() -> None:
    fit(asks := Asks("on_step_end", {2}, Run.validate), pairs(4), validate_every="1 epoch")
    assert asks.validated == [2, 6]
    fit(asks := Asks("on_step_end", {2}, Run.validate), pairs(4), validate_every=2, max_steps=3)
    assert asks.validated == [2]  # once, though both ask
    # A log point comes before a validation, and an epoch's end after both: a turn that has passed is the next
    # step's, or in the last step this one's.
    for hook, step, validated, logged in (
        ("on_log", 6, [6], []),  # whose log points are not noted
        ("on_epoch_end", 6, [7], [6, 7, 12]),
        ("on_epoch_end", 12, [12], [6, 12]),
    ):
        asks = Asks(hook, {step}, lambda run: (run.validate(), run.log_now()))
        fit(asks, pairs(4), validate_every="1000 steps", log_every=6, max_epochs=2)
        assert asks.validated == validated  # and not at the end, as a fit that has not validated is
        assert list(dict.fromkeys(asks.logged)) == logged
    fit(asks := Asks("on_step_end", {2}, Run.log_now), max_steps=4, log_every=None)
    assert asks.logged == [2, 4]  # and what is left at the end


@pytest.mark.parametrize("workers", [0, 2])
def test_run_end_epoch_leaves_the_next_epoch_all_of_its_data(workers: int) -> None:
    asks = Asks("on_step_end", {2, 5}, Run.end_epoch)
    seen: list[float] = []
    watch = LambdaCallback(
        on_step_start=lambda run: seen.extend(run.window.micro_batches[0].batch[0][:, 0].tolist())
    )
    data = DataLoader(pairs(24).dataset, batch_size=4, shuffle=True, num_workers=workers)
    result = quiet(max_epochs=3, callbacks=[asks, watch]).fit(Regression(), data)
    assert asks.epochs == [2, 5, 11]
    assert result.progress.epoch == 3
    assert [len(set(part)) for part in (seen[:8], seen[8:20], seen[20:])] == [8, 12, 24]
    assert len(seen) == 44


@pytest.mark.parametrize(("hook", "limit"), [("on_step_end", 4), ("on_save", 2)])
def test_a_fit_that_ended_an_epoch_resumes_bit_for_bit(tmp_path: Path, hook: str, limit: int) -> None:
    def train(directory: Path, **options: Any) -> Regression:
        task, asks = Regression(dropout=0.5), Asks(hook, {2}, Run.end_epoch)
        trainer = quiet(callbacks=[asks], run_dir=directory, checkpoint=FAR, **options)
        trainer.fit(task, pairs(24), resume="auto")
        return task

    whole = train(tmp_path / "whole", max_epochs=2)
    train(tmp_path / "parts", max_steps=limit)  # a request that is not met yet is in the checkpoint
    assert weights(train(tmp_path / "parts", max_epochs=2)) == weights(whole)


class StopsAt(Callback):  # asks once to stop, after one step and on one rank
    def __init__(self, step: int, rank: int = 0) -> None:
        self.step, self.rank = step, rank

    def on_step_end(self, run: Run) -> None:
        if run.progress.steps == self.step and run.engine.ranks.rank == self.rank:
            run.stop("enough")


@pytest.mark.parametrize(("least", "ends"), [({}, 2), ({"min_steps": 2}, 2), ({"min_steps": 9}, 9)])
def test_run_stop_waits_for_min_steps(least: dict[str, int], ends: int) -> None:
    result = fit(StopsAt(2), max_epochs=4, **least)
    assert (result.progress.steps, result.stop_reason) == (ends, "enough")


def test_limits_and_nonfinite_losses_do_not_wait_for_the_minimum_but_early_stopping_does() -> None:
    result = fit(StopsAt(2), max_epochs=4, min_steps=100)
    assert (result.progress.steps, result.stop_reason) == (24, "max_epochs=4 reached")
    stopping = EarlyStopping("train/loss", patience=1, threshold=1e9)
    result = fit(stopping, log_every="1 epoch", max_epochs=9, min_steps=30)
    assert result.progress.epoch == 5
    assert "for 4 log points" in result.stop_reason
    task = Regression()
    torch.nn.init.constant_(task.line.weight, torch.inf)
    result = quiet(max_epochs=4, min_steps=9, on_nonfinite="stop", log_every=1).fit(task, pairs(12))
    assert result.progress.steps == 1


def test_a_stop_that_waits_for_min_steps_is_in_the_checkpoint(tmp_path: Path) -> None:
    def train(limit: int, resume: str | None = None) -> Any:
        options = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(every=4, by=None, best=0)}
        trainer = quiet(max_steps=limit, min_steps=5, callbacks=[StopsAt(2)], **options)
        return trainer.fit(Regression(), pairs(12), resume=resume)

    train(5)
    result = train(20, resume=str(tmp_path / "checkpoints" / "step-00000004"))
    assert (result.progress.steps, result.stop_reason) == (5, "enough")


ALL = ("save", "validate", "end_epoch", "log_now")
ASKED: dict[str, tuple[str, int, set[int], tuple[str, ...]]] = {
    "all": ("on_step_end", 2, {0, 1}, ALL),
    "one": ("on_step_end", 2, {1}, ALL),
    "stops": ("on_step_end", 2, {1}, ("validate", "stop")),
    "over": ("on_epoch_end", 6, {1}, ("end_epoch", "save")),
    "last": ("on_step_end", 12, {1}, ("validate",)),
}


def asked_on_a_rank(
    directory: Path, hook: str, step: int, ranks: set[int], calls: tuple[str, ...]
) -> tuple[Any, ...]:
    def ask(run: Run) -> None:
        for call in calls if run.engine.ranks.rank in ranks else ():
            run.stop("enough") if call == "stop" else getattr(run, call)()

    asks, devices = Asks(hook, {step}, ask), {"strategy": "ddp", "devices": 2}
    options = {"run_dir": directory, "log_every": None, "validate_every": None}
    options["checkpoint"] = FAR if "save" in calls else False
    result = quiet(max_epochs=2, callbacks=[asks], **options, **devices).fit(
        Regression(), pairs(24), pairs(4)
    )
    return asks.epochs, asks.validated, asks.saved, asks.logged, result.progress.steps


def test_ranks_act_together_on_what_hooks_of_one_or_of_all_ask_for(tmp_path: Path) -> None:
    first, second = on_two_ranks(
        lambda: {case: asked_on_a_rank(tmp_path / case, *asked) for case, asked in ASKED.items()}
    )
    assert first == second
    assert [each[0] for each in first["all"][:4]] == [2, 2, 2, 2]
    at = first["one"][0][0]
    assert 2 <= at <= 4  # rank 0 may have ended step 2 when rank 1 asks
    assert first["one"][:3] == ([at, at + 6], [at], [at, at + 6])
    at = first["stops"][-1]
    assert first["stops"][1] == [at]
    assert first["over"][-1] == 12  # it ends no later epoch
    assert first["over"][2] in ([6, 12], [7, 12], [8, 12])
    assert first["last"][1] == [12]


def test_a_stop_on_one_rank_waits_for_min_steps() -> None:
    devices = {"strategy": "ddp", "devices": 2}
    first, second = on_two_ranks(
        lambda: fit(StopsAt(2, rank=1), max_epochs=4, min_steps=5, **devices).progress.steps
    )
    assert first == second
    assert 5 <= first <= 6  # rank 0 may have ended step 5 when rank 1 asks
