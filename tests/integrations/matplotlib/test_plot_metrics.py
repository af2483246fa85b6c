"""Metrics that are drawn: which, from what, and where the figures go."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import pairs, quiet, variant
from torch import Tensor

from drivetrain import ConfigError, LambdaCallback, Run
from drivetrain.callbacks import PlotMetrics

pytest.importorskip("matplotlib", reason="the extra plots is not installed")


def metrics(self: Any) -> dict[str, Any]:
    from torchmetrics.classification import BinaryAccuracy, BinaryConfusionMatrix, BinaryPrecisionRecallCurve

    confusion = BinaryConfusionMatrix()
    confusion.labels = ["small", "large"]
    return {"confusion": confusion, "curve": BinaryPrecisionRecallCurve(), "right": BinaryAccuracy()}


def metric_inputs(self: Any, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    return outputs.sigmoid().flatten(), (batch[1] > 0).int().flatten()


def fit(directory: Path, **options: Any) -> tuple[dict[str, float], list[int]]:
    counts = []

    def note(run: Run) -> None:
        counts.extend(each.results["confusion"].sum().item() for each in run.evaluation.passes)

    given = {"callbacks": [PlotMetrics(**options), LambdaCallback(on_evaluation_end=note)], "devices": 2}
    trainer = quiet(max_steps=2, loggers="tensorboard", train_metrics=False, run_dir=directory, **given)
    task = variant(metrics=metrics, metric_inputs=metric_inputs)()
    found = trainer.fit(task, pairs(8, 2), {"a": pairs(12, 2), "b": pairs(6, 2, seed=1)}).metrics
    return found, counts


def fits(directory: Path) -> Any:  # in other processes, because matplotlib keeps the files of fonts open
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torchmetrics' plot, about NumPy
        return fit(directory / "all"), fit(directory / "chosen", metrics=["right"])


def pictures(directory: Path) -> dict[str, bytes]:
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return {tag: reader.Images(tag)[-1].encoded_image_string for tag in reader.Tags()["images"]}


@pytest.mark.landing
def test_a_matrix_and_a_curve_are_drawn_for_each_loader_and_give_no_numbers(tmp_path: Path) -> None:
    ((found, counts), (of_chosen, _)), _ = on_two_ranks(fits, tmp_path)
    drawn = pictures(tmp_path / "all")
    assert set(drawn) == {f"validation/{x}/{name}/plot" for x in "ab" for name in ("confusion", "curve")}
    assert set(pictures(tmp_path / "chosen")) == {"validation/a/right/plot", "validation/b/right/plot"}
    assert counts == [12, 6]  # the samples of both ranks
    assert not any("confusion" in name or "curve" in name for name in found)
    assert {"validation/a/right", "validation/a/confusion/small/large"} <= of_chosen.keys()
    assert drawn["validation/a/confusion/plot"] != drawn["validation/b/confusion/plot"]
    image = np.asarray(
        pytest.importorskip("PIL.Image").open(io.BytesIO(drawn["validation/a/confusion/plot"]))
    )
    assert (
        len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 4
    )  # cells of several colours, and words
    chosen = PlotMetrics(["confusoin"])
    task = variant(metrics=metrics, metric_inputs=metric_inputs)()
    trainer = quiet(max_steps=1, callbacks=[chosen], loggers="tensorboard", run_dir=tmp_path / "wrong")
    assert_refused(
        ConfigError,
        {
            "name": (lambda: trainer.fit(task, pairs(), pairs()), "did you mean 'confusion'"),
            "no validation": (lambda: trainer.fit(task, pairs()), "no validation data"),
            "logger": (lambda: quiet(loggers="csv", max_steps=1, callbacks=[PlotMetrics()]), "'tensorboard'"),
        },
    )
