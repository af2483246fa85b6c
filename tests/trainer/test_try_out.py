"""Trial runs, and the short validation before training."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import Callback, CheckpointConfig, ConfigError, EarlyStopping, LossSpike, Run, Trainer
from drivetrain.testing import run_distributed


class Watched(Regression):
    """Notes the features that it trains and validates on."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trained: list[list[float]] = []
        self.validated: list[list[float]] = []

    def training_step(self, batch: Any) -> Any:
        self.trained.append(batch[0].flatten().tolist())
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.validated.append(batch[0].flatten().tolist())
        return super().validation_step(batch)


class Evaluations(Callback):
    """Notes each evaluation: whether it is the short one, after how many updates, and its batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int, int | None]] = []

    def on_evaluation_end(self, run: Run) -> None:
        self.seen.append((run.evaluation.is_sanity_check, run.progress.updates, run.evaluation.batches))
        run.log("seen", float(len(self.seen)))


# A trial.


def test_a_share_of_the_batches_to_overfit_is_called_one() -> None:
    with heard("try_out", logging.INFO) as said:
        quiet(max_epochs=1, try_out="overfit", limit_train_batches=0.4).fit(Regression(), pairs())
    assert "trains and validates on a share of 0.4 of the batches of the training data" in said[0]


@pytest.mark.parametrize(("asked", "batches"), [("batches", 1), (3, 3)])
def test_a_trial_takes_a_few_batches_in_every_verb_and_writes_nothing(
    asked: Any, batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task, data = Watched(), pairs(100)
    callbacks = [EarlyStopping("validation/loss"), LossSpike(action="rollback")]
    trainer = Trainer(
        max_steps=1000,
        min_steps=500,
        strategy="cpu",
        run_dir="runs/mine",
        try_out=asked,
        progress_bar=False,
        limit_train_batches=0.5,
        validate_every="200 steps",
        callbacks=callbacks,
    )
    with heard("try_out", logging.INFO) as said:
        result = trainer.fit(task, data, data, resume="auto")
    assert "LossSpike" in said[0]
    assert "EarlyStopping" not in said[0]
    assert (result.progress.updates, len(task.trained), len(task.validated)) == (batches, batches, batches)
    assert {"train/loss", "validation/loss"} <= set(result.metrics)
    assert (result.run_dir, result.last_checkpoint, result.model_path) == (None, None, None)
    task.validated.clear()
    trainer.validate(task, data, checkpoint="best", save_to="results.json")
    assert len(task.validated) == batches
    assert len(trainer.predict(task, data)) == batches
    assert trainer.predict(task, data, save_to="outputs") == []
    assert os.listdir(tmp_path) == []


# The same few batches.


def test_overfitting_trains_and_validates_on_the_first_batches_in_every_epoch(tmp_path: Path) -> None:
    task = Watched()
    others = pairs(20, seed=1)
    data = pairs(40, shuffle=True)
    trainer = Trainer(
        max_epochs=3,
        strategy="cpu",
        run_dir=tmp_path,
        try_out="overfit",
        limit_train_batches=2,
        progress_bar=False,
    )
    result = trainer.fit(task, data, {"a": others})
    features = data.dataset.tensors[0]
    first = [features[:2].flatten().tolist(), features[2:4].flatten().tolist()]
    assert task.trained == task.validated == first * 3
    assert "validation/a/loss" in result.metrics
    assert result.last_checkpoint is None
    assert len(result.history) > 0


def _overfitted_on_a_rank(rank: int) -> tuple[list[list[float]], list[list[float]], float]:
    task = Watched()
    trainer = quiet(max_epochs=2, strategy="ddp", devices=2, try_out="overfit", limit_train_batches=2)
    result = trainer.fit(task, pairs(20, shuffle=True))
    return task.trained, task.validated, result.metrics["validation/loss"]


def test_the_ranks_overfit_on_batches_of_their_own() -> None:
    first, second = run_distributed(_overfitted_on_a_rank, 2)
    features = pairs(20).dataset.tensors[0]
    whole = [features[2 * each : 2 * each + 2].flatten().tolist() for each in range(4)]
    for trained, validated, _ in (first, second):
        assert trained == validated == trained[:2] * 2
    assert sorted(first[0][:2] + second[0][:2]) == sorted(whole)
    assert first[2] == second[2]


# The short validation before training.


class Broken(Regression):
    def validation_step(self, batch: Any) -> Any:
        raise ValueError("broken")


def test_a_fault_in_validation_shows_before_the_first_update() -> None:
    seen = Evaluations()
    with pytest.raises(ValueError, match="broken") as raised:
        quiet(max_epochs=1, callbacks=[seen]).fit(Broken(), pairs(1000), pairs())
    assert any("sanity_validation=None" in note for note in raised.value.__notes__)
    assert any("after update 0" in note for note in raised.value.__notes__)
    with pytest.raises(ValueError, match="broken") as raised:
        quiet(max_epochs=1, sanity_validation=None).fit(Broken(), pairs(1000), pairs())
    assert any("after update 500" in note for note in raised.value.__notes__)


class Draws(Regression):
    """Draws from torch's global stream in validation too."""

    def validation_step(self, batch: Any) -> Any:
        return super().validation_step((batch[0] + torch.rand_like(batch[0]), batch[1]))


def test_it_leaves_no_trace_in_the_numbers() -> None:
    runs = []
    for asked in (None, "auto", 7):
        task, seen = Draws(dropout=0.3), Evaluations()
        trainer = quiet(max_epochs=2, sanity_validation=asked, callbacks=[seen], seed=3)
        result = trainer.fit(task, pairs(1000, shuffle=True), pairs(20))
        runs.append((task.line.weight.tolist(), result.metrics["validation/loss"]))
        short = {None: [], "auto": [(True, 0, 2)], 7: [(True, 0, 7)]}[asked]
        assert seen.seen == [*short, (False, 500, 10), (False, 1000, 10)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("name", [None, "{validation/loss:.2f}"])
def test_what_waits_for_a_validation_waits_for_the_first_whole_one(name: str | None, tmp_path: Path) -> None:
    kept = CheckpointConfig(best=1, name=name)
    options: dict[str, Any] = {"checkpoint": kept, "run_dir": tmp_path, "sanity_validation": 1}
    trainer = quiet(max_epochs=2, log_every="1 step", callbacks=[EarlyStopping()], **options)
    result = trainer.fit(Regression(), pairs(), pairs())
    assert result.stop_reason == "max_epochs=2 reached"
    assert result.best_checkpoint is not None


def test_by_default_it_is_made_where_it_costs_under_a_hundredth_of_an_epoch() -> None:
    def short(batches: int, data: Any = None, **options: Any) -> bool:
        seen = Evaluations()
        trainer = quiet(**{"max_epochs": 1, **options}, callbacks=[seen])
        trainer.fit(Regression(), pairs(batches, batch_size=1), data or pairs())
        return seen.seen[0][0]

    assert short(201)
    assert not short(200)
    assert not short(201, {"a": pairs(), "b": pairs()})
    assert short(401, {"a": pairs(), "b": pairs()})
    assert not short(1000, max_steps=100)
    assert not short(1000, iter(list(pairs())))
    assert short(10, sanity_validation=1)


def test_data_that_can_be_read_once_is_not_used_up() -> None:
    once = iter(list(pairs()))
    with pytest.raises(ConfigError, match="sanity_validation=2 would use up batches of the validation data"):
        quiet(max_epochs=1, sanity_validation=2).fit(Regression(), pairs(), once)
    assert len(list(once)) == 5


def test_what_reads_a_whole_evaluation_does_not_read_a_part() -> None:
    read: list[int] = []

    class Reader:
        def __init__(self) -> None:
            self.records = 0

        def record(self, loss: Tensor | None, outputs: Any, batch: Any) -> int:
            return len(batch[0])

        def add(self, record: int) -> None:
            self.records += record

        def compute(self) -> dict[str, float]:
            read.append(self.records)
            return {}

        def close(self) -> None:
            pass

    class Reading(Regression):
        def evaluation_reader(self) -> Any:
            return Reader()

    quiet(max_epochs=1, sanity_validation=2).fit(Reading(), pairs(), pairs())
    assert read == [10]


def test_a_resumed_fit_has_none(tmp_path: Path) -> None:
    seen = Evaluations()
    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True, "sanity_validation": 1}
    quiet(max_epochs=1, **options).fit(Regression(), pairs(), pairs())
    quiet(max_epochs=2, callbacks=[seen], **options).fit(Regression(), pairs(), pairs(), resume="auto")
    assert [short for short, *_ in seen.seen] == [False]
