"""Trial runs, and the short validation before training."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import Callback, CheckpointConfig, EarlyStopping, Profile, Run, Trainer


class Watched(Regression):  # notes the features that it trains and validates on
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trained, self.validated = list[Any](), list[Any]()

    def training_step(self, batch: Any) -> Any:
        self.trained.append(batch[0].flatten().tolist())
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.validated.append(batch[0].flatten().tolist())
        return super().validation_step(batch)


# Notes each evaluation: whether it is the short one, after how many steps, and its batches.
class Evaluations(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[bool, int, int | None]] = []

    def on_evaluation_end(self, run: Run) -> None:
        self.seen.append((run.evaluation.is_sanity_check, run.progress.steps, run.evaluation.batches))
        run.log("seen", float(len(self.seen)))


def test_dry_run_takes_a_few_batches_in_every_verb_and_writes_nothing(tmp_path: Path) -> None:
    for asked, batches in ((True, 1), (3, 3)):
        task, data = Watched(), pairs(100)
        callbacks = [EarlyStopping("validation/loss"), Profile()]
        limits: Any = {"max_steps": 1000, "min_steps": 500, "limit_train_batches": 0.5}
        options: Any = {"strategy": "cpu", "progress_bar": False, "validate_every": "200 steps", **limits}
        trainer = Trainer(**options, run_dir="runs/mine", dry_run=asked, callbacks=callbacks)
        with heard("dry_run", logging.INFO) as said:
            result = trainer.fit(task, data, data, resume="auto")
        assert "Profile" in said[0]
        assert "EarlyStopping" not in said[0]
        assert (result.progress.steps, len(task.trained), len(task.validated)) == (batches,) * 3
        assert {"train/loss", "validation/loss"} <= set(result.metrics)
        assert (result.run_dir, result.last_checkpoint, result.model_path) == (None, None, None)
        task.validated.clear()
        trainer.validate(task, data, checkpoint="best")
        assert len(task.validated) == batches
        assert len(trainer.predict(task, data)) == batches
        assert trainer.predict(task, data, save_to="outputs") == []
        assert os.listdir(tmp_path) == []


def test_sanity_validation_shows_a_fault_before_the_first_step() -> None:
    def fail(self: Any, batch: Any) -> Any:
        raise ValueError("broken")

    for options, words in (
        ({}, ("sanity_validation=None", "after step 0")),
        ({"sanity_validation": None}, ("after step 500",)),
    ):
        with pytest.raises(ValueError, match="broken") as raised:
            quiet(max_epochs=1, **options).fit(variant(validation_step=fail)(), pairs(1000), pairs())
        assert all(any(each in note for note in raised.value.__notes__) for each in words)


def test_sanity_validation_leaves_no_trace_in_the_numbers() -> None:
    def draw(self: Any, batch: Any) -> Any:  # from torch's global stream
        return Regression.validation_step(self, (batch[0] + torch.rand_like(batch[0]), batch[1]))

    runs = []
    for asked, short in ((None, []), ("auto", [(True, 0, 2)]), (7, [(True, 0, 7)])):
        task, seen = variant(validation_step=draw)(dropout=0.3), Evaluations()
        trainer = quiet(max_epochs=2, sanity_validation=asked, callbacks=[seen], seed=3)
        result = trainer.fit(task, pairs(1000, shuffle=True), pairs(20))
        runs.append((task.line.weight.tolist(), result.metrics["validation/loss"]))
        assert seen.seen == [*short, (False, 500, 10), (False, 1000, 10)]
    assert runs[0] == runs[1] == runs[2]


def test_sanity_validation_counts_for_no_policy_and_no_resume(tmp_path: Path) -> None:
    kept = CheckpointConfig(best=1)
    options: dict[str, Any] = {"checkpoint": kept, "run_dir": tmp_path, "sanity_validation": 1}
    trainer = quiet(max_epochs=2, log_every="1 step", callbacks=[EarlyStopping()], **options)
    result = trainer.fit(Regression(), pairs(), pairs())
    assert result.stop_reason == "max_epochs=2 reached"
    assert result.best_checkpoint is not None
    seen = Evaluations()
    again = quiet(max_epochs=3, callbacks=[EarlyStopping(), seen], **options)
    again.fit(Regression(), pairs(), pairs(), resume="auto")
    assert [short for short, *_ in seen.seen] == [False]


def test_sanity_validation_by_default_where_it_costs_under_a_hundredth_of_an_epoch() -> None:
    def short(batches: int, data: Any = None, **options: Any) -> bool:
        seen = Evaluations()
        trainer = quiet(**{"max_epochs": 1, **options}, callbacks=[seen])
        trainer.fit(Regression(), pairs(batches, batch_size=1), data or pairs())
        return seen.seen[0][0]

    assert [short(201), short(200), short(1000, max_steps=100)] == [True, False, False]
    assert not short(1000, iter(list(pairs())))  # data that can be read once is not used up
    assert short(10, sanity_validation=1)
