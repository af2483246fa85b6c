"""What a checkpoint of a run holds: a resumed fit goes on with every state of the one before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet, variant
from torchmetrics import MeanAbsoluteError

from drivetrain import Callback, CheckpointConfig, CheckpointError, LambdaCallback


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
    assert len({each for update in straight for each in update}) == 3 * 10
    first, rest = drawn(tmp_path / "parts", 2, max_steps=3), drawn(tmp_path / "parts", 3)
    assert first + rest == straight


class Counting(Callback):
    """Counts updates over restarts."""

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
    class Twice(Counting):
        def on_step_end(self, run: Any) -> None:
            self.count += 2

    Twice.__name__ = "Counting"
    first_run(tmp_path, callbacks=[Counting(), Twice()])
    one, two = Counting(), Twice()
    resumed(tmp_path, callbacks=[one, two])
    assert (one.count, two.count) == (10, 20)
    assert one.average.tolist() == [5.0, 5.0]


def test_a_resume_with_other_callbacks_warns(tmp_path: Path) -> None:
    first_run(tmp_path)
    new = Counting()
    with warned("no state for the callback Counting"):
        resumed(tmp_path, callbacks=[new])
    assert new.count == 7
    with warned("callbacks that this run does not have: Counting"):
        resumed(tmp_path)


def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    callback = Counting()
    callback.state_dict = lambda: {"file": object()}  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"Counting.*file"):
        first_run(tmp_path, callbacks=[callback])
    assert not list((tmp_path / "checkpoints").glob("update-*"))


def test_values_and_metrics_in_the_middle_of_a_log_interval_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Stopped after 3 of the 4 updates of an interval: its log point is that of an undisturbed run."""
    measured = variant(metrics=lambda self: {"error": MeanAbsoluteError()})

    def points(run_dir: Path, stops: list[int]) -> list[dict[str, float]]:
        for stop in stops:
            seen: list[dict[str, float]] = []
            log = LambdaCallback(
                on_step_end=lambda run: run.log("two", 2) if run.progress.updates == 2 else None,
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


class Stream:
    """Batches without a length, which can be gone on with."""

    def __init__(self) -> None:
        self.batches, self.at, self.given = list(pairs(16)), 0, 0

    def __iter__(self) -> Any:
        start, self.at = self.at, 0
        for number in range(start, len(self.batches)):
            self.given += 1
            self.at = number + 1
            yield self.batches[number]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_stateful_iterable_is_resumed_by_its_own_state(tmp_path: Path) -> None:
    whole, task, rest = Regression(), Regression(), Stream()
    quiet(max_epochs=2).fit(whole, Stream())
    policy = CheckpointConfig(every="1 step", by=None)
    options: dict[str, Any] = {"checkpoint": policy, "run_dir": tmp_path}
    quiet(max_steps=5, **options).fit(Regression(), Stream())
    quiet(max_epochs=2, **options).fit(task, rest, resume="auto")
    assert weights(task) == weights(whole)
    assert rest.given == 16 - 5
