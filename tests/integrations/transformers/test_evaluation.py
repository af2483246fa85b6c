"""Metrics over a whole evaluation, and generation in it, on one process and on several."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import loader, model, rows
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.engine.metrics.arrays import joined

datasets = Lazy("datasets")
hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

TAGS = "bert, tags"


class Kept:
    def __init__(self) -> None:
        self.given: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.given.append(prediction)
        labels = prediction.label_ids
        return {"rows": len(labels), "labels": float(labels[labels != -100].sum())}


def evaluated(family: str, data: Any, **options: Any) -> tuple[dict[str, float], Any]:
    kept = Kept()
    values = quiet().validate(hf.TransformersTask(model(family), compute_metrics=kept, **options), data)
    return values, kept.given[-1]


def test_compute_metrics_sees_the_whole_set_in_order_padded_with_the_ignored_label() -> None:
    values, whole = evaluated(TAGS, loader(TAGS, 7, 2))
    assert values["validation/rows"] == 7
    assert (whole.label_ids.shape, whole.predictions.shape) == ((7, 6), (7, 6, 3))
    for row, sample in zip(whole.label_ids, rows(TAGS, 7), strict=True):
        length = len(sample["labels"])
        assert row[:length].tolist() == sample["labels"].tolist()
        assert (row[length:] == -100).all()

    def largest(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(labels)
        return logits.argmax(-1)

    _, given = evaluated(TAGS, loader(TAGS, 7), preprocess_logits_for_metrics=largest)
    labelled = given.label_ids != -100
    assert (given.predictions == whole.predictions.argmax(-1))[labelled].all()


def test_metrics_may_be_computed_batch_by_batch() -> None:
    seen: list[tuple[int, bool]] = []

    def compute(prediction: Any, compute_result: bool) -> dict[str, float]:
        assert isinstance(prediction.predictions, torch.Tensor)
        seen.append((len(prediction.label_ids), compute_result))
        return {"rows": sum(each for each, _ in seen)} if compute_result else {}

    task = hf.TransformersTask(model("vit"), compute_metrics=compute, batch_eval_metrics=True)
    assert quiet().validate(task, loader("vit", 5))["validation/rows"] == 5
    assert seen == [(2, False), (2, False), (1, True)]


def test_refusals() -> None:
    batches = [{"a": np.zeros((1, 2))}, {"a": np.zeros((1, 2)), "b": np.zeros(1)}]
    unlabelled = [{"pixel_values": each["pixel_values"]} for each in loader("vit", 4)]
    listed = hf.TransformersTask(model("vit"), compute_metrics=lambda prediction: {"table": [1, 2]})
    sets = {"labelled": loader("vit", 3), "other": unlabelled}

    def made(**options: Any) -> Any:
        return lambda: hf.TransformersTask(model("vit"), **options)

    cases: dict[str, Any] = {
        "another structure": (lambda: joined(batches), "have 2 arrays"),
        "a parameter": (made(compute_metrics=Kept(), batch_eval_metrics=True), "parameter compute_result"),
        "a list": (lambda: quiet().validate(listed, loader("vit", 3)), "returned 'table' as a list"),
        "no labels": (lambda: evaluated("vit", sets), "this batch lacks them", "pixel_values"),
    }
    assert_refused((ConfigError, DataError, ValueError), cases)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_evaluation_and_prediction_generate(family: str) -> None:
    for each in ({"num_beams": 2}, {"do_sample": False, "num_return_sequences": 1}):
        options = {"max_new_tokens": 4, "pad_token_id": 1, **each}
        _, given = evaluated(family, loader(family, 3), generate=options)
        made = hf.TransformersTask(model(family), generate=options).eval()
        predicted = quiet().predict(made, loader(family, 3))
        kept = {name: each for name, each in next(iter(loader(family, 3))).items() if name != "labels"}
        with torch.no_grad():
            right = made.model.generate(**kept, **options)
        assert torch.equal(predicted[0], right)
        assert given.predictions[:2, : right.shape[1]].tolist() == right.tolist()
        assert len(given.predictions) == 3
    if family == "t5":  # a collator's decoder_input_ids are the labels, and no beginning to go on from
        shown = [{**each, "decoder_input_ids": each["labels"].clamp_min(0)} for each in loader(family, 3)]
        assert torch.equal(quiet().predict(made, shown)[0], right)


def generated(strategy: str, family: str, count: int) -> tuple[dict[str, float], list[Any]]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # T5's blocks return views
    options = {"generate": {"max_new_tokens": 6, "num_beams": 2}, "compute_metrics": Kept()}
    task = hf.TransformersTask(model(family), **options)
    trainer = quiet(strategy=strategy, devices=2, max_steps=1)
    values = trainer.fit(task, loader(family, 4), loader(family, count)).metrics
    return values, [row for each in trainer.predict(task, loader(family, count)) for row in each.tolist()]


@pytest.mark.landing
@pytest.mark.parametrize(("strategy", "family"), [("ddp", "gpt2"), ("fsdp", "t5")])
def test_ranks_with_uneven_data_generate_together(strategy: str, family: str) -> None:
    for count in (3, 5):  # batches of two: in the last round one rank has fewer, or none
        first, second = on_two_ranks(generated, strategy, family, count)
        for each in (first, second):
            for name in [name for name in each[0] if name.startswith("time")]:
                del each[0][name]
        assert first == second
        assert first[0]["validation/rows"] == len(first[1]) == count
