"""What hooks may ask a fit for: a checkpoint, a validation, the end of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch.utils.data import DataLoader

from drivetrain import Callback, CheckpointConfig, ConfigError, LambdaCallback, Run
from drivetrain.testing import run_distributed

FAR = CheckpointConfig(every="1000 steps", keep_last=9, best=0, by=None)


class Asks(Callback):
    """Asks for something after an update, in a hook, and notes what is called from then on."""

    def __init__(self, hook: str, updates: set[int], ask: Callable[[Run], None]) -> None:
        self.epochs: list[int] = []
        self.validated: list[int] = []
        self.saved: list[int] = []
        setattr(self, hook, lambda run: ask(run) if run.progress.updates in updates else None)

    def on_epoch_end(self, run: Run) -> None:
        self.epochs.append(run.progress.updates)

    def on_evaluation_start(self, run: Run) -> None:
        self.validated.append(run.progress.updates)

    def on_checkpoint_saved(self, run: Run) -> None:
        self.saved.append(run.progress.updates)


def fit(asks: Asks, validation: Any = None, **options: Any) -> Any:
    trainer = quiet(callbacks=[asks], **{"max_epochs": 1, **options})
    return trainer.fit(Regression(), pairs(12), validation)


@pytest.mark.parametrize("hook", ["on_step_end", "on_log"])
def test_a_hook_asks_for_a_checkpoint_at_the_end_of_its_update(tmp_path: Path, hook: str) -> None:
    asks = Asks(hook, {2, 3}, Run.save)
    result = fit(asks, run_dir=tmp_path, checkpoint=FAR, log_every=1)
    assert asks.saved == [2, 3, result.progress.updates]
    assert (tmp_path / "checkpoints" / "update-00000002" / "manifest.json").exists()


def test_a_hook_asks_for_a_validation(tmp_path: Path) -> None:
    asks = Asks("on_step_end", {2}, Run.validate)
    result = fit(asks, pairs(4), validate_every="1 epoch")
    assert asks.validated == [2, result.progress.updates]
    asks = Asks("on_step_end", {2}, Run.validate)
    fit(asks, pairs(4), validate_every=2, max_steps=3)
    assert asks.validated == [2]  # once, though both ask


@pytest.mark.parametrize("hook", ["on_log", "on_epoch_end"])
def test_what_a_hook_asks_for_late_in_an_update_is_still_done_in_it(hook: str) -> None:
    asks = Asks(hook, {6}, lambda run: (run.validate(), run.log_now()))
    fit(asks, pairs(4), validate_every="1000 steps", log_every=6, max_epochs=2)
    assert asks.validated == [6]  # and not at the end, as a fit that has not validated is


def test_an_epoch_that_is_ended_after_a_log_point_does_what_is_due_at_its_end() -> None:
    asks = Asks("on_log", {2}, Run.end_epoch)
    fit(asks, pairs(4), log_every=2, max_epochs=2)
    assert asks.epochs == asks.validated == [2, 8]


def test_a_hook_asks_for_a_log_point() -> None:
    logged: list[int] = []
    watch = LambdaCallback(on_log=lambda run: logged.append(run.progress.updates))
    ask = Asks("on_step_end", {2}, Run.log_now)
    quiet(max_steps=4, log_every=None, callbacks=[ask, watch]).fit(Regression(), pairs(12))
    assert logged == [2, 4]  # and what is left at the end


@pytest.mark.parametrize("workers", [0, 2])
def test_a_hook_ends_an_epoch_and_the_next_one_has_all_of_its_data(workers: int) -> None:
    asks = Asks("on_step_end", {2, 5}, Run.end_epoch)
    seen: list[float] = []
    watch = LambdaCallback(
        on_step_start=lambda run: seen.extend(run.window.micro_batches[0].batch[0][:, 0].tolist())
    )
    data = DataLoader(pairs(24).dataset, batch_size=4, shuffle=True, num_workers=workers)
    result = quiet(max_epochs=3, callbacks=[asks, watch]).fit(Regression(), data)
    assert asks.epochs == [2, 5, 11]
    assert result.progress.epoch == 3
    assert len(set(seen[:8])) == 8
    assert len(set(seen[8:20])) == 12
    assert len(set(seen[20:])) == len(seen[20:]) == 24


def test_a_run_that_ended_an_epoch_resumes_bit_for_bit(tmp_path: Path) -> None:
    def train(directory: Path, **options: Any) -> Regression:
        task = Regression(dropout=0.5)
        trainer = quiet(
            callbacks=[Asks("on_step_end", {2}, Run.end_epoch)], run_dir=directory, checkpoint=FAR, **options
        )
        trainer.fit(task, pairs(24), resume="auto")
        return task

    whole = train(tmp_path / "whole", max_epochs=2)
    train(tmp_path / "parts", max_steps=4)
    assert weights(train(tmp_path / "parts", max_epochs=2)) == weights(whole)


def _on_two_ranks(rank: int, directory: str) -> tuple[list[int], list[int], list[int]]:
    asks = Asks("on_step_end", {2}, lambda run: (run.save(), run.validate(), run.end_epoch()))
    trainer = quiet(
        max_epochs=2, strategy="ddp", devices=2, callbacks=[asks], run_dir=directory, checkpoint=FAR
    )
    trainer.fit(Regression(), pairs(24), pairs(4))
    return asks.epochs, asks.validated, asks.saved


def test_all_ranks_act_together(tmp_path: Path) -> None:
    first, second = run_distributed(_on_two_ranks, 2, str(tmp_path))
    assert first == second
    epochs, validated, saved = first
    assert epochs[0] == validated[0] == saved[0] == 2


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Run.save, r"run\.save\(\) in a fit that saves nothing"),
        (Run.validate, r"run\.validate\(\) in a fit that has no validation data"),
    ],
)
def test_what_a_fit_cannot_do_is_refused(ask: Callable[[Run], None], message: str) -> None:
    left: list[set[str]] = []

    def refused(run: Run) -> None:
        with pytest.raises(ConfigError, match=message):
            ask(run)
        left.append(set(run.requests))

    fit(Asks("on_step_end", {1}, refused))
    assert left == [set()]


@pytest.mark.parametrize("ask", [Run.save, Run.validate, Run.end_epoch, Run.log_now])
def test_a_validation_outside_a_fit_is_asked_for_nothing(ask: Callable[[Run], None]) -> None:
    callback = LambdaCallback(on_evaluation_end=ask)
    with pytest.raises(ConfigError, match=r"is for the hooks of a fit; this run is a validation run"):
        quiet(callbacks=[callback]).validate(Regression(), pairs(4))
