"""What a checkpoint of a run holds: a fit that is left, killed or over and resumed loses nothing."""

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor
from torchmetrics import MeanAbsoluteError

from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    EarlyStopping,
    LambdaCallback,
    OptimizerConfig,
    Trainer,
)


def first_run(run_dir: Path, task: Any = None, **options: Any) -> None:
    trainer = quiet(**{"max_steps": 3, "checkpoint": True, "run_dir": run_dir, **options})
    trainer.fit(task or Regression(), pairs())


def resumed(run_dir: Path, task: Any = None, **options: Any) -> Any:
    trainer = quiet(**{"max_epochs": 2, "checkpoint": True, "run_dir": run_dir, **options})
    return trainer.fit(task or Regression(), pairs(), resume="auto")


def test_a_resume_restores_the_generators_of_torch_numpy_and_python(tmp_path: Path) -> None:
    def drawn(run_dir: Path, seed: int, **options: Any) -> list[tuple[float, ...]]:
        torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)  # what the process drew before
        draws: list[tuple[float, ...]] = []
        draw = LambdaCallback(
            on_step_end=lambda run: draws.append((torch.rand(1).item(), np.random.rand(), random.random()))
        )
        resumed(run_dir, callbacks=[draw], **options)
        return draws

    straight = drawn(tmp_path / "straight", 1)
    assert len({each for step in straight for each in step}) == 3 * 10
    first, rest = drawn(tmp_path / "parts", 2, max_steps=3), drawn(tmp_path / "parts", 3)
    assert first + rest == straight


def test_a_resume_restores_the_optimizers_state(tmp_path: Path) -> None:
    def after(run_dir: Path, *stops: int) -> Any:
        for steps in stops:
            task = Regression(OptimizerConfig("adamw", lr=0.05))
            resumed(run_dir, task, max_steps=steps)
        return weights(task)

    assert after(tmp_path / "parts", 3, 6) == after(tmp_path / "straight", 6)


class Counting(Callback):  # counts steps over restarts
    def __init__(self) -> None:
        self.count = 0
        self.average = torch.zeros(2)

    def on_step_end(self, run: Any) -> None:
        self.count += 1
        self.average += 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.average = state["count"], state["average"]


def test_a_resume_restores_callbacks_two_of_a_kind_included(tmp_path: Path) -> None:
    twice: dict[str, Any] = {"on_step_end": lambda self, run: setattr(self, "count", self.count + 2)}
    Twice = type("Counting", (Counting,), twice)
    first_run(tmp_path, callbacks=[Counting(), Twice()])
    one, two = Counting(), Twice()
    resumed(tmp_path, callbacks=[one, two])
    assert (one.count, two.count) == (10, 20)
    assert one.average.tolist() == [5.0, 5.0]


def test_values_and_metrics_in_the_middle_of_a_log_interval_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Stopped after 3 of the 4 steps of an interval: its log point is that of an undisturbed run."""
    measured = variant(metrics=lambda self: {"error": MeanAbsoluteError()})

    def points(run_dir: Path, stops: list[int]) -> list[dict[str, float]]:
        for stop in stops:
            seen: list[dict[str, float]] = []
            log = LambdaCallback(
                on_step_end=lambda run: run.log("two", 2) if run.progress.steps == 2 else None,
                on_log=lambda run, seen=seen: seen.append(dict(run.logged)),
            )
            options: dict[str, Any] = {"checkpoint": True, "run_dir": run_dir, "callbacks": [log]}
            quiet(max_steps=stop, log_every=4, **options).fit(measured(), pairs(), resume="auto")
        return seen

    straight = points(tmp_path / "one", [9])
    assert set(straight[0]) == {"train/loss", "train/error", "two"}
    assert points(tmp_path / "two", [3, 9])[:1] == straight[:1]


def test_a_loss_scale_goes_on_after_a_resume(tmp_path: Path) -> None:
    scales: list[float] = []

    def look(run: Any) -> None:
        scales.append(run.engine.strategy.state_dict()["scaler"]["scale"])

    looking = LambdaCallback(on_fit_start=look, on_fit_end=look)
    options: dict[str, Any] = {"precision": "16-mixed", "callbacks": [looking]}
    first_run(tmp_path, **options)
    resumed(tmp_path, **options)
    assert scales[0] == 2.0**16 > scales[1] == scales[2]


def test_a_run_resumes_from_a_path_into_a_new_directory(tmp_path: Path) -> None:
    whole, task = Regression(), Regression()
    quiet(max_epochs=2).fit(whole, pairs())
    first_run(tmp_path / "first")
    trainer = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path / "second")
    result = trainer.fit(task, pairs(), resume=str(tmp_path / "first"))
    assert weights(task) == weights(whole)
    assert result.last_checkpoint is not None
    assert str(tmp_path / "second") in result.last_checkpoint


class Killed(BaseException):
    """Ends a run from inside, as a signal would."""


@pytest.mark.parametrize("left_at", [3, 7, 14])
def test_a_steps_loop_that_is_left_keeps_what_was_due_at_that_step(tmp_path: Path, left_at: int) -> None:
    def train(run_dir: Path, leave: int | None = None) -> Regression:
        options = {"patience": 0, "threshold": 0.5}
        plateau = OptimizerConfig("sgd", lr=0.05, schedule="reduce_on_plateau", schedule_options=options)
        task = Regression(plateau)
        often = {"validate_every": "7 steps", "log_every": 7}
        trainer = quiet(max_epochs=4, checkpoint=True, loggers="csv", run_dir=run_dir, **often)
        steps = trainer.steps(task, pairs(), pairs(seed=1), resume="auto")
        for result in steps:
            if result.step + 1 == leave:
                break
        steps.close()
        return task

    straight = train(tmp_path / "straight")
    train(tmp_path / "left", left_at)
    assert weights(train(tmp_path / "left")) == weights(straight)
    with (tmp_path / "left" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        validated = [row["step"] for row in csv.DictReader(file) if row["validation/loss"]]
    assert validated == ["7", "14"]


@pytest.mark.parametrize("by_limit", [True, False])
def test_a_validation_that_only_the_end_of_a_fit_made_counts_for_nothing_when_it_goes_on(
    tmp_path: Path, by_limit: bool
) -> None:
    def train(run_dir: Path, steps: int = 24, stops: int = 0) -> object:
        options = {"patience": 0, "threshold": 0.5}
        plateau = {"schedule": "reduce_on_plateau", "schedule_options": options}
        task = Regression(OptimizerConfig("sgd", lr=0.02, maximize=True, **plateau))  # each loss is the worst
        stop = LambdaCallback(on_step_end=lambda run: run.progress.steps == stops and run.stop("enough"))
        best = CheckpointConfig(every=None, restore_best=by_limit)
        given = {"checkpoint": best, "callbacks": [EarlyStopping(patience=2), stop], "run_dir": run_dir}
        trainer = quiet(max_steps=steps, validate_every="10 steps", **given)
        result = trainer.fit(task, pairs(), pairs(seed=1), resume="auto")
        return weights(task), result.stop_reason, by_limit and result.best_value

    train(tmp_path / "longer", **({"steps": 6} if by_limit else {"stops": 6}))
    assert train(tmp_path / "longer") == train(tmp_path / "straight")


class Stream:  # batches without an end, with a state of its own that outlives an epoch
    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[list[Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.drawn)
            self.drawn += 1
            features = torch.randn(2, 4, generator=generator)
            yield [features, features.sum(1, keepdim=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Rewound(Stream):  # six batches; a state that was loaded counts for the next iteration only
    def __init__(self) -> None:
        super().__init__()
        self._go_on = False

    def __iter__(self) -> Iterator[list[Tensor]]:
        if not self._go_on:
            self.drawn = 0
        self._go_on = False
        endless = super().__iter__()
        while self.drawn < 6:
            yield next(endless)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._go_on = True


@pytest.mark.parametrize(("kind", "limit"), [(Stream, 4), (Rewound, None), (Rewound, 4)])
def test_data_with_a_state_resumes_at_any_step(tmp_path: Path, kind: type[Stream], limit: int | None) -> None:
    def train(run_dir: Path, kill: int | None = None) -> Regression:
        def at(run: Any) -> None:
            if run.progress.steps == kill:
                raise Killed

        task = Regression()
        checkpoint = CheckpointConfig(every="1 step", by=None)
        options: dict[str, Any] = {"limit_train_batches": limit, "run_dir": run_dir, "checkpoint": checkpoint}
        trainer = quiet(max_steps=12, callbacks=[LambdaCallback(on_step_start=at)], **options)
        trainer.fit(task, kind(), resume="auto")
        return task

    straight = train(tmp_path / "straight")
    for killed_at in (3, 4, 6):
        with pytest.raises(Killed):
            train(tmp_path / str(killed_at), killed_at)
        assert weights(train(tmp_path / str(killed_at))) == weights(straight), killed_at


def test_a_fit_that_early_stopping_ended_stays_so_when_it_is_resumed(tmp_path: Path) -> None:
    def kill(run: Any) -> None:
        if run.stop_reason:
            raise Killed

    def trainer(*more: Any, patience: int = 2) -> Trainer:
        stopping = EarlyStopping(mode="max", patience=patience)
        return quiet(max_epochs=20, run_dir=tmp_path, checkpoint=True, callbacks=[stopping, *more])

    task = Regression()
    with pytest.raises(Killed):
        trainer(LambdaCallback(on_checkpoint_saved=kill)).fit(task, pairs(), pairs())
    for _ in range(2):
        resumed = Regression()
        result = trainer().fit(resumed, pairs(), pairs(), resume="auto")
        assert result.progress.epoch == 3
        assert result.stop_reason.startswith("early stopping")
        assert weights(resumed) == weights(task)
    assert trainer(patience=4).fit(Regression(), pairs(), pairs(), resume="auto").progress.epoch == 5


class Buffered(Regression):
    """A buffer that becomes None in the second step, two that get another shape and one another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", None)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("first", torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any) -> Any:
        if len(self.seen) or self.late is not None:
            self.first = None
            self.seen = torch.cat([self.seen, batch[0].mean()[None]])
        self.count = self.count + 0.25
        self.late = batch[0].mean(0) if self.late is None else self.late.lerp(batch[0].mean(0), 0.1)
        return super().training_step((batch[0] - self.late + self.seen.sum(), batch[1]))


def test_a_save_warns_of_weights_that_came_or_went_since_the_fit_began(tmp_path: Path) -> None:
    def step(self: Any, batch: Any) -> Any:
        if self.progress.steps == 1:
            self.register_buffer("new", torch.zeros(2))
        return Regression.training_step(self, batch)

    policy = CheckpointConfig(every="1 steps")
    with warned("'new' of Variant came or went during the fit") as told:
        quiet(max_steps=3, run_dir=tmp_path, checkpoint=policy).fit(variant(training_step=step)(), pairs())
    assert len(told) == 1


def test_a_buffer_of_another_shape_is_resumed_and_is_an_error_in_a_warm_start(tmp_path: Path) -> None:
    def end(steps: int, folder: str) -> Any:
        task = Buffered()
        options: Any = {"checkpoint": True, "run_dir": tmp_path / folder}
        quiet(max_steps=steps, max_epochs=None, **options).fit(task, pairs(12), resume="auto")
        return weights(task)

    end(3, "parts")
    with warned("'first' is None in"):
        assert end(6, "parts") == end(6, "whole")
        assert weights(Buffered.from_checkpoint(tmp_path / "whole")) == end(6, "whole")
    with pytest.raises(CheckpointError, match="'seen'"):
        Buffered().load_weights(tmp_path / "whole")
