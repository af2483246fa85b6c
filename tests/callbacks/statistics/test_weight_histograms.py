"""Histograms of weights and gradients: their counts, where they are written, and resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.callbacks.statistics.test_gradient_norms import Layers
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain import Callback, Run
from drivetrain.callbacks import WeightHistograms
from drivetrain.core.registry import is_installed
from drivetrain.loggers import BinCounts
from drivetrain.testing import run_distributed


class Kept:  # a logger that keeps what it is given
    takes = ("histogram",)

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, BinCounts]]] = []
        self.log_metrics = self.log_config = self.close = lambda *given: None

    def log_media(self, values: Any, step: int) -> None:
        self.points.append((step, {name: each.counts for name, each in values.items()}))


class ByHand(Callback):  # the whole weights at each log point, and the whole gradients before each step
    def __init__(self) -> None:
        self.tensors: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, run: Run) -> None:
        named = [(name, each.grad) for name, each in run.task.named_parameters() if each.grad is not None]
        self._gradients = {
            f"gradients/{name}": run.full_tensor(each).to_dense().clone() for name, each in named
        }

    def on_log(self, run: Run) -> None:
        whole = {name: run.full_tensor(each).detach().clone() for name, each in run.task.named_parameters()}
        self.tensors.append({**{f"weights/{name}": each for name, each in whole.items()}, **self._gradients})


def kept_of(task: Any, data: Any, histograms: Any, **options: Any) -> list[tuple[int, dict[str, BinCounts]]]:
    """The histograms of a fit, with their steps."""
    kept, callback = Kept(), WeightHistograms(**histograms)
    quiet(**{"max_steps": 1, **options}, loggers=kept, callbacks=[callback]).fit(task, data)
    return kept.points


def assert_of(histogram: BinCounts, tensor: Tensor) -> None:
    """Assert that a histogram has torch's counts of a tensor, and its other numbers."""
    flat = tensor.double().flatten()
    by_torch = torch.histogram(tensor.flatten().float(), len(histogram.counts))
    assert histogram.counts == [int(each) for each in by_torch.hist]
    assert histogram.edges == pytest.approx(by_torch.bin_edges.tolist(), rel=1e-6, abs=1e-7)
    assert (histogram.minimum, histogram.maximum) == (float(flat.min()), float(flat.max()))
    assert histogram.sum == pytest.approx(float(flat.sum()), rel=1e-5, abs=1e-6)
    assert histogram.sum_of_squares == pytest.approx(float(flat.square().sum()), rel=1e-5)
    assert histogram.nonfinite == 0


def test_the_counts_are_those_of_torch_histogram() -> None:
    kept, by_hand = Kept(), ByHand()
    callbacks = [WeightHistograms(bins=7, gradients=True), by_hand]
    options = {"max_epochs": 2, "log_every": "2 steps", "max_grad_norm": 0.01, "loggers": kept}
    quiet(**options, callbacks=callbacks).fit(Layers(), pairs(20))
    assert [step for step, _ in kept.points] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    for (_, histograms), tensors in zip(kept.points, by_hand.tensors, strict=True):
        assert histograms.keys() == tensors.keys()
        for name, each in histograms.items():
            assert_of(each, tensors[name])


def test_patterns_choose_parameters_and_frozen_ones_are_left_out_without() -> None:
    task = Layers(unused=False)
    task.first.weight.requires_grad_(False)
    ((_, found),) = kept_of(task, pairs(), {"gradients": True})
    names = {"first.bias", "second.weight", "second.bias", "scale"}
    assert set(found) == {f"{kind}/{each}" for kind in ("weights", "gradients") for each in names}
    ((_, found),) = kept_of(task, pairs(), {"patterns": "first.*", "gradients": True})
    assert set(found) == {"weights/first.weight", "weights/first.bias", "gradients/first.bias"}


def parameters(**values: Tensor) -> Regression:  # a regression with frozen parameters of these values besides
    task = Regression()
    for name, value in values.items():
        setattr(task, name, nn.Parameter(value, requires_grad=False))
    return task


def test_values_that_are_no_numbers_are_counted_apart() -> None:
    odd = torch.tensor([1.0, torch.nan, 3.0, -torch.inf, torch.inf, 2.0])
    task = parameters(odd=odd, same=torch.full((5,), 2.0), none=torch.empty(0))
    histograms = {"bins": 2, "patterns": ["odd", "same", "none"]}
    assert kept_of(task, pairs(), histograms)[0][1] == {
        "weights/odd": BinCounts([1.0, 2.0, 3.0], [1, 2], 1.0, 3.0, 6.0, 14.0, nonfinite=3),
        "weights/same": BinCounts([1.5, 2.0, 2.5], [0, 5], 2.0, 2.0, 10.0, 20.0),
    }
    for dtype in (torch.bfloat16, torch.float64):  # without rounding
        values = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
        points = kept_of(parameters(more=values), pairs(), {"bins": 11, "patterns": "more"})
        assert_of(points[0][1]["weights/more"], values)


def layers() -> Layers:
    task = Layers(unused=False)
    task.scale = nn.Parameter(torch.ones(1))  # ZeRO shards no scalars
    return task


class Ungathered(WeightHistograms):  # fails where anything is gathered from shards
    def on_log(self, run: Run) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather_into_tensor", None)
            super().on_log(run)


def on_ranks(strategy: str, gradients: bool) -> list[tuple[int, dict[str, BinCounts]]]:
    kept, by_hand = Kept(), ByHand()
    callbacks = [Ungathered(bins=5, gradients=gradients), by_hand]
    options: Any = {"devices": 2, "max_steps": 3, "log_every": "1 step", "loggers": kept}
    quiet(strategy=strategy, **options, callbacks=callbacks).fit(layers(), pairs(12, batch_size=2))
    for (_, histograms), tensors in zip(kept.points, by_hand.tensors, strict=False):
        for name, each in histograms.items():
            assert_of(each, tensors[name])
    return kept.points


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("zero3", marks=pytest.mark.nightly)])
def test_shards_add_up_to_the_counts_of_one_process(strategy: str) -> None:
    is_zero = strategy.startswith("zero")
    if is_zero and not is_installed("deepspeed"):
        pytest.skip("needs deepspeed")
    found, nothing = (run_distributed if is_zero else on_two_ranks)(on_ranks, strategy, not is_zero)
    assert not nothing  # loggers are rank 0's
    histograms = {"bins": 5, "gradients": not is_zero}
    data = pairs(12, batch_size=4)
    alone = kept_of(layers(), data, histograms, max_steps=3, log_every="1 step")
    assert [step for step, _ in found] == [step for step, _ in alone] == [1, 2, 3]
    # After a step the weights differ in rounding only, which moves none of them over an edge.
    for (_, each), (_, expected) in zip(found, alone, strict=True):
        counts = [{name: one.counts for name, one in point.items()} for point in (each, expected)]
        assert counts[0] == counts[1]


def test_loggers_write_histograms_and_the_history_leaves_them_out(tmp_path: Path) -> None:
    options: Any = {"max_steps": 4, "log_every": "2 steps", "loggers": ("jsonl", "tensorboard")}
    options["run_dir"] = tmp_path
    callbacks = [WeightHistograms(bins=3, patterns="line.weight")]
    result = quiet(**options, callbacks=callbacks).fit(Regression(), pairs())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "train/loss"], ["step", "histograms"]] * 2
    stored = rows[1]["histograms"]["weights/line.weight"]
    assert len(stored["edges"]) == 4
    assert sum(stored["counts"]) == 4
    reader = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    (shown, second) = reader.Histograms("weights/line.weight")
    assert (shown.step, second.step) == (2, 4)
    filled = [count for count in stored["counts"] if count]
    assert [count for count in shown.histogram_value.bucket if count] == filled
    assert shown.histogram_value.sum == stored["sum"]
    assert result.history == [{"step": 2, "train/loss": rows[0]["train/loss"]}, rows[2]]
