"""Metrics over a whole evaluation, and generation in it, on one process and on several."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import OverAll
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.testing import run_distributed

transformers = pytest.importorskip("transformers")

from tests.integrations.transformers.families import loader, model, rows  # noqa: E402

from drivetrain.engine.metrics.arrays import Arrays  # noqa: E402
from drivetrain.integrations.transformers import TransformersTask  # noqa: E402
from drivetrain.integrations.transformers.generation import is_sharded  # noqa: E402

pytestmark = pytest.mark.full


class Kept:
    """A `compute_metrics` that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.given.append(prediction)
        labels = prediction.label_ids
        return {"rows": len(labels), "labels": float(labels[labels != -100].sum())}


def evaluated(family: str, data: Any, **options: Any) -> tuple[dict[str, float], Any]:
    """The values of a validation, and what `compute_metrics` was given."""
    kept = Kept()
    values = quiet().validate(TransformersTask(model(family), compute_metrics=kept, **options), data)
    return values, kept.given[-1]


def test_metrics_see_the_whole_set_in_order_padded_with_the_ignored_label() -> None:
    values, given = evaluated("bert, tags", loader("bert, tags", 7, 2))
    samples = rows("bert, tags", 7)
    assert values["validation/rows"] == 7
    assert given.label_ids.shape == (7, 6)
    assert given.predictions.shape == (7, 6, 3)
    for row, sample in zip(given.label_ids, samples, strict=True):
        length = len(sample["labels"])
        assert row[:length].tolist() == sample["labels"].tolist()
        assert (row[length:] == -100).all()


@pytest.mark.parametrize("limit", [0, 300])
def test_outputs_above_the_limit_go_to_files(limit: int) -> None:
    _, held = evaluated("bert, tags", loader("bert, tags", 7, 2))
    sums: list[float] = []

    def compute(prediction: Any) -> dict[str, float]:
        assert isinstance(prediction.predictions, np.memmap)
        np.testing.assert_array_equal(prediction.predictions, held.predictions)
        np.testing.assert_array_equal(prediction.label_ids, held.label_ids)
        sums.append(float(prediction.predictions.sum()))
        return {"sum": sums[-1]}

    task = TransformersTask(model("bert, tags"), compute_metrics=compute, metrics_memory=limit)
    values = quiet().validate(task, loader("bert, tags", 7, 2))
    assert values["validation/sum"] == sums[0]


def test_arrays_of_different_structure_are_refused() -> None:
    arrays = Arrays(None)
    arrays.add({"a": np.zeros((1, 2))})
    with pytest.raises(ValueError, match="one batch have 2 arrays, those of another 1"):
        arrays.add({"a": np.zeros((1, 2)), "b": np.zeros(1)})


def test_logits_are_preprocessed_before_they_are_kept() -> None:
    def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(labels)
        return logits.argmax(-1)

    _, given = evaluated("bert, tags", loader("bert, tags", 5), preprocess_logits_for_metrics=largest)
    assert given.predictions.shape == (5, 6)
    _, whole = evaluated("bert, tags", loader("bert, tags", 5))
    labelled = given.label_ids != -100
    assert (given.predictions == whole.predictions.argmax(-1))[labelled].all()


def test_inputs_and_losses_are_included_when_asked_for() -> None:
    _, given = evaluated("bert, classes", loader("bert, classes", 5), include_for_metrics=("inputs", "loss"))
    assert given.inputs.shape[0] == given.losses.shape[0] == 5
    assert given.losses[0] == given.losses[1]
    with pytest.raises(ConfigError, match="include_for_metrics"):
        TransformersTask(model("vit"), include_for_metrics=("losses",))


def test_metrics_may_be_computed_batch_by_batch() -> None:
    seen: list[tuple[int, bool]] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(prediction.predictions, torch.Tensor)
        assert isinstance(prediction.label_ids, torch.Tensor)
        seen.append((len(prediction.label_ids), compute_result))
        return {"rows": sum(each for each, _ in seen)} if compute_result else {}

    task = TransformersTask(model("vit"), compute_metrics=compute, batch_eval_metrics=True)
    assert quiet().validate(task, loader("vit", 5))["validation/rows"] == 5
    assert seen == [(2, False), (2, False), (1, True)]
    with pytest.raises(ConfigError, match="Give it the parameter compute_result"):
        TransformersTask(model("vit"), compute_metrics=Kept(), batch_eval_metrics=True)


def test_each_named_set_has_values_of_its_own() -> None:
    values, _ = evaluated("vit", {"one": loader("vit", 3), "other": loader("vit", 5)})
    assert (values["validation/one/rows"], values["validation/other/rows"]) == (3, 5)


def test_a_value_that_is_no_number_is_refused() -> None:
    task = TransformersTask(model("vit"), compute_metrics=lambda prediction: {"table": [1, 2]})
    with pytest.raises(ConfigError, match="returned 'table' as a list"):
        quiet().validate(task, loader("vit", 3))


def test_a_set_without_labels_is_refused_where_metrics_need_them() -> None:
    unlabelled = [{"pixel_values": each["pixel_values"]} for each in loader("vit", 4)]
    with pytest.raises(DataError, match="this batch lacks them: its columns are pixel_values"):
        evaluated("vit", {"labelled": loader("vit", 3), "other": unlabelled})


@pytest.mark.parametrize(
    "options", [{"max_length": 4}, transformers.GenerationConfig(max_length=4, eos_token_id=None)]
)
def test_a_maximal_length_replaces_the_new_tokens_of_the_model(options: Any) -> None:
    given = model("t5")
    given.generation_config.update(max_new_tokens=9, eos_token_id=None)
    (found,) = quiet().predict(TransformersTask(given, generate=options), list(loader("t5", 2)))
    assert found.shape == (2, 4)
    assert given.generation_config.max_new_tokens == 9


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart", "whisper"])
@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": False, "num_return_sequences": 1}])
def test_evaluation_and_prediction_generate(family: str, options: dict[str, Any]) -> None:
    options = {"max_new_tokens": 4, "pad_token_id": 1, **options}
    _, given = evaluated(family, loader(family, 3), generate=options)
    made = TransformersTask(model(family), generate=options).eval()
    predicted = quiet().predict(made, loader(family, 3))
    batches = list(loader(family, 3))
    kept = {name: each for name, each in batches[0].items() if name != "labels"}
    with torch.no_grad():
        right = made.model.generate(**kept, **options)
    assert torch.equal(predicted[0], right)
    width = right.shape[1]
    assert given.predictions[:2, :width].tolist() == right.tolist()
    assert len(given.predictions) == 3


def generated(strategy: str, family: str, count: int) -> tuple[dict[str, float], list[Any], bool]:
    """The values and tokens of an evaluation and a prediction that generate."""
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # T5's blocks return views, and change none
    kept = Kept()
    task = TransformersTask(
        model(family), compute_metrics=kept, generate={"max_new_tokens": 6, "num_beams": 2}
    )
    devices = "auto" if strategy == "cpu" else 2
    trainer = quiet(strategy=strategy, devices=devices, max_steps=1, hang_timeout=60)
    values = trainer.fit(task, loader(family, 4), loader(family, count)).metrics
    found = [row for each in trainer.predict(task, loader(family, count)) for row in each.tolist()]
    return values, found, is_sharded(task)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_ranks_with_uneven_data_generate_together(strategy: str, family: str) -> None:
    """Three samples in batches of two: in the last round one rank has fewer, or none."""
    for count in (3, 5):
        first, second = run_distributed(generated, strategy, family, count, timeout=200)
        assert first[0] == second[0]
        assert first[1] == second[1]
        assert first[0]["validation/rows"] == count
        assert len(first[1]) == count


def test_a_metric_of_evaluate_is_called_over_all_samples(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its thread would outlive the test
    evaluate = pytest.importorskip("evaluate")
    datasets = pytest.importorskip("datasets")

    class Wrong(evaluate.Metric):
        def _info(self) -> Any:
            features = datasets.Features(
                {each: datasets.Value("int64") for each in ("predictions", "references")}
            )
            return evaluate.MetricInfo("", "", features=features)

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {"wrong": float(sum(p != r for p, r in zip(predictions, references, strict=True)))}

    class Lines(Regression):
        def metrics(self) -> dict[str, Any]:
            function = Wrong(cache_dir=str(tmp_path)).compute
            return {"all": OverAll(function, transform=lambda o, t: (o[:, 0] > 0, t[:, 0] > 0))}

    task, data = Lines(), pairs(9)
    features, target = data.dataset.tensors
    with torch.no_grad():
        right = float(((task(features) > 0) != (target > 0)).sum())
    assert quiet().validate(task, data)["validation/all/wrong"] == right > 0
