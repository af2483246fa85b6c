"""`predict(..., metrics=True)`: the outputs and the values of a validation, in one pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torchmetrics import MeanSquaredError

from drivetrain import Callback, ConfigError, DataError, OverAll, PredictResult, Run, StepOutput
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.testing import run_distributed


class Measured(Regression):
    """Has one metric of each kind, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, features: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(features)

    def metrics(self) -> Mapping[str, Any]:
        return {"error": MeanSquaredError(), "rows": OverAll(lambda outputs, target: len(target))}


class Doubled(Measured):
    """Predicts something else than its forward gives, and draws from the random streams in both steps."""

    def validation_step(self, batch: Any) -> StepOutput:
        outputs = self(batch[0] + torch.rand_like(batch[0]))
        return StepOutput(self.loss(outputs, batch), outputs, {"largest": outputs.max()})

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        return {"double": 2 * self(batch[0]) + torch.rand(1)}


def flat(outputs: list[Any]) -> list[list[float]]:
    return [(each["double"] if isinstance(each, dict) else each).flatten().tolist() for each in outputs]


def compared(kind: type[Measured], **options: Any) -> PredictResult:
    """The result, once it is equal to those of the two verbs."""
    trainer, data = quiet(**options), pairs(7, 2, shuffle=True)
    found = trainer.predict(kind(), data, metrics=True)
    assert isinstance(found, PredictResult)
    assert found.metrics == trainer.validate(kind(), data)
    assert found.metrics["validation/rows"] == 7
    assert flat(found.outputs) == flat(trainer.predict(kind(), data))
    return found


@pytest.mark.parametrize("kind", [Measured, Doubled])
def test_outputs_are_those_of_predict_and_values_those_of_validate(kind: type[Measured]) -> None:
    assert len(compared(kind).outputs) == 4


def test_they_are_with_batches_run_in_parts() -> None:
    compared(Measured, micro_batch=1)


def test_a_task_without_steps_of_its_own_runs_its_forward_once() -> None:
    for kind, forwards in ((Measured, 4), (Doubled, 8)):
        task = kind()
        quiet().predict(task, pairs(7, 2), metrics=True)
        assert task.forwards == forwards


def _on_a_rank(kind: type[Measured], strategy: str) -> tuple[list[list[float]], dict[str, float]]:
    found = compared(kind, strategy=strategy, devices=2)
    return flat(found.outputs), found.metrics


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Measured, "ddp"),
        pytest.param(Doubled, "ddp", marks=pytest.mark.full),
        pytest.param(Measured, "fsdp", marks=pytest.mark.full),
        pytest.param(Doubled, "zero3", marks=pytest.mark.full),
    ],
)
def test_on_several_ranks_all_have_the_same(kind: type[Measured], strategy: str) -> None:
    first, second = run_distributed(_on_a_rank, kind, strategy)
    assert first == second
    assert sum(map(len, first[0])) == 7


def test_outputs_may_go_to_files(tmp_path: Path) -> None:
    data = pairs(5, 2)
    found = quiet().predict(Measured(), data, save_to=tmp_path / "outputs", metrics=True)
    assert found.metrics == quiet().validate(Measured(), data)
    whole = quiet().predict(Measured(), data)
    assert all(
        torch.equal(read_predictions(file), each) for file, each in zip(found.outputs, whole, strict=True)
    )


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}], ids=["whole", "in parts"])
def test_callbacks_get_the_values_and_may_add_their_own(options: dict[str, Any]) -> None:
    class Adds(Callback):
        def on_evaluation_end(self, run: Run) -> None:
            assert (run.stage, run.evaluation.samples) == ("predict", 5)
            run.log("twice", 2 * run.evaluation.values["validation/rows"])

    assert (
        quiet(callbacks=[Adds()], **options).predict(Measured(), pairs(5), metrics=True).metrics["twice"]
        == 10
    )


# Targets.


class Labelled(Measured):
    """Reads its target in the loss by name."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["target"]).square().mean()


class Quiet(Measured):
    """Has no loss that reads the target."""

    def validation_step(self, batch: Any) -> StepOutput:
        return StepOutput(None, self.predict_step(batch))  # type: ignore[arg-type]


class Weighed(Measured):
    def loss_weight(self, batch: Any) -> float:
        return float(len(batch["target"]))


@pytest.mark.parametrize("kind", [Labelled, Quiet, Weighed])
def test_data_without_targets_is_refused(kind: type[Measured]) -> None:
    data = [{"features": torch.ones(2, 4)}]
    with pytest.raises(DataError) as raised:
        quiet().predict(kind(), data, metrics=True)
    words = " ".join([str(raised.value), *raised.value.__notes__])
    assert "predict(metrics=True) needs data with targets" in words
    assert len(quiet().predict(kind(), data)) == 1


def test_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be True or False, not 'yes'"):
        quiet().predict(Measured(), pairs(), metrics="yes")

    class Refuses(Measured):
        no_predict_metrics = "it logs for itself"

    with pytest.raises(ConfigError, match="with a Refuses: it logs for itself"):
        quiet().predict(Refuses(), pairs(), metrics=True)


def test_a_trial_writes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = quiet(try_out=2).predict(Measured(), pairs(), save_to=tmp_path / "no", metrics=True)
    assert found.outputs == []
    assert found.metrics["validation/rows"] == 4
    assert list(tmp_path.iterdir()) == []
