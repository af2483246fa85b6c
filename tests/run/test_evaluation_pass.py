"""What is made of a pass over evaluation data: `predict(..., metrics=True)`, and what a reader reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor
from torchmetrics import MeanSquaredError

from drivetrain import Callback, EpochMetric, PredictResult, StepOutput
from drivetrain.checkpoint.prediction_files import read_predictions


class Measured(Regression):  # has one metric of each kind, and counts its forwards
    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, features: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(features)

    def metrics(self) -> Mapping[str, Any]:
        return {"error": MeanSquaredError(), "rows": EpochMetric(lambda outputs, target: len(target))}


# Predicts something else than its forward gives, and draws from the random streams in both steps.
class Doubled(Measured):
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
    assert flat(found.outputs) == flat(trainer.predict(kind(), pairs(7, 2)))  # in the data set's order
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


class Structured(Measured):  # each sample in several forms
    def predict_step(self, batch: Any) -> Any:
        rows = batch[0]
        return {
            "rows": rows,
            "pair": (rows[:, 0], rows),
            "names": [str(float(x)) for x in rows[:, 0]],
            "no": None,
        }


def joined(devices: int = 2) -> Any:
    trainer = quiet(strategy="auto" if devices == 1 else "ddp", devices=devices)
    found = trainer.predict(Structured(), pairs(7, 2), joined=True, metrics=True)
    return found.outputs, str(found.outputs), found.metrics["validation/rows"]


def test_joined_outputs_are_those_of_all_samples_on_each_rank() -> None:
    outputs, text, rows = joined(1)
    assert torch.equal(outputs["rows"], torch.cat([each[0] for each in pairs(7, 2)]))
    assert torch.equal(outputs["pair"][1], outputs["rows"])
    assert outputs["names"] == [str(float(x)) for x in outputs["pair"][0]]
    assert outputs["no"] is None
    assert [each[1:] for each in on_two_ranks(joined)] == [(text, rows)] * 2


def test_predict_with_metrics_may_save_to_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = pairs(5, 2)
    found = quiet().predict(Measured(), data, save_to=tmp_path / "outputs", metrics=True)
    assert found.metrics == quiet().validate(Measured(), data)
    whole = quiet().predict(Measured(), data)
    for file, each in zip(found.outputs, whole, strict=True):
        assert torch.equal(read_predictions(file), each)
    # A trial writes nothing.
    with caplog.at_level(logging.INFO):
        found = quiet(dry_run=2).predict(Measured(), data, save_to=tmp_path / "no", metrics=True)
    assert (found.outputs, found.metrics["validation/rows"]) == ([], 4)
    assert [each.name for each in tmp_path.iterdir()] == ["outputs"]


class Reader:  # notes the features of all samples, and what was done with itself
    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.rows = notes, list[Tensor]()

    def record(self, loss: Tensor | None, outputs: Any, batch: Any) -> Tensor:
        assert loss is not None
        assert not loss.requires_grad
        assert len(outputs) == len(batch[0])
        return batch[0]

    def add(self, record: Tensor) -> None:
        self.rows.append(record)

    def compute(self) -> Mapping[str, float]:
        self.notes.append(torch.cat(self.rows))
        return {"rows": float(len(self.notes[-1]))}

    def close(self) -> None:
        self.notes.append("closed")


class Reads(Callback):
    def __init__(self) -> None:
        self.notes: list[Any] = []

    def evaluation_reader(self) -> Reader:
        return Reader(self.notes)


def validated(devices: int | str, **options: Any) -> tuple[dict[str, float], list[Any]]:
    reads = Reads()
    strategy = "cpu" if devices == "auto" else "ddp"
    trainer = quiet(strategy=strategy, devices=devices, callbacks=[reads], **options)
    found = trainer.validate(Regression(), pairs(7, 2, shuffle=True))
    assert devices != "auto" or reads.notes[-1] == "closed"
    return found, [each.tolist() for each in reads.notes if isinstance(each, Tensor)]


IN_ORDER: Any = pairs(7).dataset.tensors[0].tolist()  # type: ignore[attr-defined]


def test_an_evaluation_reader_reads_all_samples_in_the_order_of_the_dataset() -> None:
    values, (rows,) = validated("auto")
    assert values["validation/rows"] == 7
    assert rows == IN_ORDER


def test_the_evaluation_reader_of_rank_0_reads_the_samples_of_all_and_all_get_its_values() -> None:
    (first, (rows,)), (second, nothing) = on_two_ranks(validated, 2)
    assert first == second
    assert first["validation/rows"] == 7
    assert rows == IN_ORDER
    assert nothing == []


def predict_step(self: Any, batch: Any) -> Any:
    outputs = self(batch[0])
    return {"value": outputs, "parts": [outputs > 0, (len(outputs), "text", None)]}


def test_predict_save_to_writes_what_predict_would_have_returned(tmp_path: Path) -> None:
    task = variant(predict_step=predict_step)()
    kept = quiet().predict(task, pairs(5))
    files = quiet().predict(task, pairs(5), save_to=tmp_path / "new" / "predictions")
    assert [file.name for file in files] == [f"predictions-{number:06d}.safetensors" for number in range(3)]
    for file, right in zip(files, kept, strict=True):
        read = read_predictions(file)
        assert torch.equal(read["value"], right["value"])
        assert torch.equal(read["parts"][0], right["parts"][0])
        assert read["parts"][1] == right["parts"][1]
    (file,) = quiet().predict(Regression(), pairs(2), save_to=tmp_path)
    (tensor,) = load_file(file).values()
    assert tensor.shape == (2, 1)
