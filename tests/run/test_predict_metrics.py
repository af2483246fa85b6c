"""`predict(..., metrics=True)`: the outputs and the values of a validation, in one pass."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torchmetrics import MeanSquaredError

from drivetrain import DataError, OverAll, PredictResult, StepOutput
from drivetrain.checkpoint.prediction_files import read_predictions


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


@pytest.mark.parametrize(("kind", "forwards"), [(Measured, 4), (Doubled, 8)])
def test_predict_with_metrics_has_the_outputs_of_predict_and_the_values_of_validate(
    kind: type[Measured], forwards: int
) -> None:
    assert len(compared(kind).outputs) == 4
    # A task without steps of its own runs its forward once.
    task = kind()
    quiet().predict(task, pairs(7, 2), metrics=True)
    assert task.forwards == forwards


def on_a_rank() -> list[Any]:
    cases = ((Measured, "ddp"), (Doubled, "ddp"), (Measured, "fsdp"))
    found = [compared(kind, strategy=strategy, devices=2) for kind, strategy in cases]
    return [(flat(each.outputs), each.metrics) for each in found]


def test_predict_with_metrics_gives_all_ranks_the_same() -> None:
    first, second = on_two_ranks(on_a_rank)
    assert first == second
    assert [sum(map(len, outputs)) for outputs, _ in first] == [7, 7, 7]


def test_predict_with_metrics_may_save_outputs_to_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pairs(5, 2)
    found = quiet().predict(Measured(), data, save_to=tmp_path / "outputs", metrics=True)
    assert found.metrics == quiet().validate(Measured(), data)
    whole = quiet().predict(Measured(), data)
    for file, each in zip(found.outputs, whole, strict=True):
        assert torch.equal(read_predictions(file), each)
    # A trial writes nothing.
    with caplog.at_level(logging.INFO):
        found = quiet(try_out=2).predict(Measured(), data, save_to=tmp_path / "no", metrics=True)
    assert (found.outputs, found.metrics["validation/rows"]) == ([], 4)
    assert [each.name for each in tmp_path.iterdir()] == ["outputs"]


class Labelled(Measured):
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch["target"]).square().mean()


def test_predict_with_metrics_refuses_data_without_targets() -> None:
    data = [{"features": torch.ones(2, 4)}]
    with pytest.raises(DataError) as raised:
        quiet().predict(Labelled(), data, metrics=True)
    words = " ".join([str(raised.value), *raised.value.__notes__])
    assert "predict(metrics=True) needs data with targets" in words
    assert len(quiet().predict(Labelled(), data)) == 1
