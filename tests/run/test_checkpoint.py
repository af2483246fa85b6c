"""What a checkpoint of a run holds, and what it refuses to be loaded into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import Callback, CheckpointConfig, CheckpointError, Engine, LambdaCallback, OptimizerConfig


def first_run(run_dir: Path, task: Any = None, **options: Any) -> None:
    trainer = quiet(**{"max_steps": 3, "checkpoint": True, "run_dir": run_dir, **options})
    trainer.fit(task or Regression(), pairs())


def resumed(run_dir: Path, task: Any = None, **options: Any) -> Any:
    trainer = quiet(**{"max_epochs": 2, "checkpoint": True, "run_dir": run_dir, **options})
    return trainer.fit(task or Regression(), pairs(), resume="auto")


def test_another_seed_is_refused_with_the_one_to_use(tmp_path: Path) -> None:
    first_run(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"seed=1, this Trainer has seed=2.*Use Trainer\(seed=1\)"):
        resumed(tmp_path, seed=2)


def test_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    first_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"SGD.*AdamW"):
        resumed(tmp_path, Regression(OptimizerConfig("adamw", lr=0.1)))


def test_another_architecture_is_refused_with_what_differs(tmp_path: Path) -> None:
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 2)
            self.more = nn.Linear(2, 1)

        def forward(self, features: Tensor) -> Tensor:
            return self.more(self.line(features))

    first_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing 'more\.bias'.*shape \(1,\) there, \(2,\) here"):
        resumed(tmp_path, Wider())


def test_another_precision_of_the_weights_is_refused(tmp_path: Path) -> None:
    first_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"float32 there, torch\.float64 here"):
        resumed(tmp_path, precision="64")


def test_weights_alone_are_no_resume_point(tmp_path: Path) -> None:
    Engine("cpu").save(str(tmp_path / "weights"), model=Regression())
    with pytest.raises(CheckpointError, match="no checkpoint of a Trainer's run"):
        quiet(max_epochs=1).fit(Regression(), pairs(), resume=str(tmp_path / "weights"))


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


def test_callbacks_with_a_state_go_on_two_of_a_kind_included(tmp_path: Path) -> None:
    class Twice(Counting):
        def on_step_end(self, run: Any) -> None:
            self.count += 2

    Twice.__name__ = "Counting"
    first_run(tmp_path, callbacks=[Counting(), Twice()])
    one, two = Counting(), Twice()
    resumed(tmp_path, callbacks=[one, two])
    assert (one.count, two.count) == (10, 20)
    assert one.average.tolist() == [5.0, 5.0]


def test_a_callback_that_the_checkpoint_does_not_know_starts_anew_with_a_warning(tmp_path: Path) -> None:
    first_run(tmp_path)
    new = Counting()
    with warned("no state for the callback Counting"):
        resumed(tmp_path, callbacks=[new])
    assert new.count == 7


def test_a_callback_that_is_gone_is_missed_with_a_warning(tmp_path: Path) -> None:
    first_run(tmp_path, callbacks=[Counting()])
    with warned("callbacks that this run does not have: Counting"):
        resumed(tmp_path)


def test_a_state_that_cannot_be_stored_is_an_error_that_names_it(tmp_path: Path) -> None:
    class Unstorable(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    with pytest.raises(CheckpointError, match=r"Unstorable.*file"):
        first_run(tmp_path, callbacks=[Unstorable()])
    assert not list((tmp_path / "checkpoints").glob("update-*"))


def test_values_and_metrics_in_the_middle_of_a_log_interval_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Stopped after 3 of the 4 updates of an interval: its log point is that of an undisturbed run."""

    def points(run_dir: Path, stops: list[int]) -> list[dict[str, float]]:
        seen: list[dict[str, float]] = []
        for attempt, stop in enumerate(stops):
            last = attempt == len(stops) - 1
            log = LambdaCallback(
                on_step_end=lambda run: (
                    run.log("updates", run.progress.updates) if run.progress.updates == 2 else None
                ),
                on_log=lambda run, last=last: seen.append(dict(run.logged)) if last else None,
            )
            trainer = quiet(
                max_steps=stop, log_every="4 steps", checkpoint=True, run_dir=run_dir, callbacks=[log]
            )
            trainer.fit(Regression(), pairs(), resume="auto")
        return seen

    assert points(tmp_path / "two", [3, 9])[:1] == points(tmp_path / "one", [9])[:1]


def test_a_declared_metric_in_the_middle_of_a_log_interval_is_in_the_checkpoint(tmp_path: Path) -> None:
    from torchmetrics import MeanAbsoluteError

    class Measured(Regression):
        def metrics(self) -> dict[str, Any]:
            return {"error": MeanAbsoluteError()}

    def logged(run_dir: Path, stops: list[int]) -> float:
        for stop in stops:
            trainer = quiet(max_steps=stop, log_every="4 steps", checkpoint=True, run_dir=run_dir)
            result = trainer.fit(Measured(), pairs(), resume="auto")
        return float(result.metrics["train/error"])

    assert logged(tmp_path / "two", [3, 4]) == logged(tmp_path / "one", [4])


def test_a_loss_scale_goes_on_after_a_resume(tmp_path: Path) -> None:
    scales: list[float] = []
    look = LambdaCallback(
        on_fit_start=lambda run: scales.append(run.engine.strategy.state_dict()["scaler"]["scale"]),
        on_fit_end=lambda run: scales.append(run.engine.strategy.state_dict()["scaler"]["scale"]),
    )
    options: dict[str, Any] = {"precision": "16-mixed", "callbacks": [look]}
    first_run(tmp_path, **options)
    resumed(tmp_path, **options)
    assert scales[0] == 2.0**16 > scales[1] == scales[2]


def test_a_run_resumes_from_a_path_into_a_new_directory(tmp_path: Path) -> None:
    whole = Regression()
    quiet(max_epochs=2).fit(whole, pairs())
    first_run(tmp_path / "first")
    task = Regression()
    trainer = quiet(max_epochs=2, checkpoint=True, run_dir=tmp_path / "second")
    result = trainer.fit(task, pairs(), resume=str(tmp_path / "first"))
    assert weights(task) == weights(whole)
    assert result.last_checkpoint is not None
    assert str(tmp_path / "second") in result.last_checkpoint


def test_a_stateful_iterable_is_resumed_by_its_own_state(tmp_path: Path) -> None:
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

    whole = Regression()
    quiet(max_epochs=2).fit(whole, Stream())
    options: dict[str, Any] = {
        "checkpoint": CheckpointConfig(every="1 step", by=None), "run_dir": tmp_path
    }  # fmt: skip
    quiet(max_steps=5, **options).fit(Regression(), Stream())
    task, rest = Regression(), Stream()
    quiet(max_epochs=2, **options).fit(task, rest, resume="auto")
    assert weights(task) == weights(whole)
    assert rest.given == 16 - 5
