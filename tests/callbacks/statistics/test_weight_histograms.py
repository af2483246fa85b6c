"""Histograms of weights and gradients: their counts, where they are written, and resumes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.callbacks.statistics.test_gradient_norms import Layers
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from drivetrain import Callback, ConfigError, LambdaCallback, Run, WeightHistograms
from drivetrain.core.registry import is_installed
from drivetrain.loggers import Histogram
from drivetrain.testing import run_distributed


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, Histogram]]] = []
        self.log_metrics = self.log_config = self.close = lambda *given: None

    def log_histograms(self, histograms: Any, step: int) -> None:
        self.points.append((step, dict(histograms)))


class ByHand(Callback):
    """The whole weights at each log point, and the whole gradients before each step."""

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


def kept_of(task: Any, data: Any, *more: Any, **options: Any) -> list[tuple[int, dict[str, Histogram]]]:
    """The histograms of a fit, with their updates."""
    kept, callback = Kept(), WeightHistograms(**options.pop("histograms", {}))
    quiet(**options, loggers=kept, callbacks=[callback]).fit(task, data, *more)
    return kept.points


def assert_of(histogram: Histogram, tensor: Tensor) -> None:
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
    ((_, found),) = kept_of(task, pairs(), max_steps=1, histograms={"gradients": True})
    names = {"first.bias", "second.weight", "second.bias", "scale"}
    assert set(found) == {f"{kind}/{each}" for kind in ("weights", "gradients") for each in names}
    chosen = {"patterns": "first.*", "gradients": True}
    ((_, found),) = kept_of(task, pairs(), max_steps=1, histograms=chosen)
    assert set(found) == {"weights/first.weight", "weights/first.bias", "gradients/first.bias"}
    data = torch.utils.data.DataLoader(duels(), batch_size=2)  # several optimizers
    points = kept_of(Duel(), data, max_steps=2, histograms={"gradients": True, "patterns": "*.weight"})
    nets = ("generator.weight", "discriminator.weight")
    assert set(points[-1][1]) == {f"{kind}/{net}" for kind in ("weights", "gradients") for net in nets}


def test_gradients_are_counted_only_in_updates_that_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, inner = [], torch.bincount

    def count(*given: Any, **more: Any) -> Any:
        counted.append(1)
        return inner(*given, **more)

    monkeypatch.setattr(torch, "bincount", count)
    chosen = {"gradients": True, "patterns": "line.weight"}
    kept_of(Regression(), pairs(40), max_steps=9, log_every="4 steps", histograms=chosen)
    # Weights and gradients after updates 4, 8 and 9; after update 1 a log point may follow, and did not.
    assert len(counted) == 2 * 3 + 1


def parameters(**values: Tensor) -> Regression:
    """A regression with frozen parameters of these values besides."""
    task = Regression()
    for name, value in values.items():
        setattr(task, name, nn.Parameter(value, requires_grad=False))
    return task


def test_values_that_are_no_numbers_are_counted_apart() -> None:
    odd = torch.tensor([1.0, torch.nan, 3.0, -torch.inf, torch.inf, 2.0])
    task = parameters(odd=odd, same=torch.full((5,), 2.0), none=torch.empty(0))
    histograms = {"bins": 2, "patterns": ["odd", "same", "none"]}
    assert kept_of(task, pairs(), max_steps=1, histograms=histograms)[0][1] == {
        "weights/odd": Histogram([1.0, 2.0, 3.0], [1, 2], 1.0, 3.0, 6.0, 14.0, nonfinite=3),
        "weights/same": Histogram([1.5, 2.0, 2.5], [0, 5], 2.0, 2.0, 10.0, 20.0),
    }
    for dtype in (torch.bfloat16, torch.float64):  # without rounding
        values = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
        chosen = {"bins": 11, "patterns": "more"}
        points = kept_of(parameters(more=values), pairs(), max_steps=1, histograms=chosen)
        assert_of(points[0][1]["weights/more"], values)


def layers() -> Layers:
    task = Layers(unused=False)
    task.scale = nn.Parameter(torch.ones(1))  # ZeRO shards no scalars
    return task


def on_ranks(strategy: str, gradients: bool) -> list[tuple[int, dict[str, Histogram]]]:
    kept, by_hand = Kept(), ByHand()
    callbacks = [WeightHistograms(bins=5, gradients=gradients), by_hand]
    options: Any = {"devices": 2, "max_steps": 3, "log_every": "1 step", "loggers": kept}
    quiet(strategy=strategy, **options, callbacks=callbacks).fit(layers(), pairs(12, batch_size=2))
    for (_, histograms), tensors in zip(kept.points, by_hand.tensors, strict=False):
        for name, each in histograms.items():
            assert_of(each, tensors[name])
    return kept.points


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "zero1", "zero3"))],
)
def test_shards_add_up_to_the_counts_of_one_process(strategy: str) -> None:
    is_zero = strategy.startswith("zero")
    if is_zero and not is_installed("deepspeed"):
        pytest.skip("needs deepspeed")
    found, nothing = (run_distributed if is_zero else on_two_ranks)(on_ranks, strategy, not is_zero)
    assert not nothing  # loggers are rank 0's
    histograms = {"bins": 5, "gradients": not is_zero}
    data = pairs(12, batch_size=4)
    alone = kept_of(layers(), data, max_steps=3, log_every="1 step", histograms=histograms)
    assert [step for step, _ in found] == [step for step, _ in alone] == [1, 2, 3]
    # After an update the weights differ in rounding only, which moves none of them over an edge.
    for (_, each), (_, expected) in zip(found, alone, strict=True):
        counts = [{name: one.counts for name, one in point.items()} for point in (each, expected)]
        assert counts[0] == counts[1]


def gathered_at_a_log_point() -> list[int]:
    gathered: list[int] = []
    inner = torch.distributed.all_gather_into_tensor

    def watch(run: Run) -> None:
        def noted(*given: Any, **more: Any) -> Any:
            gathered.append(1)
            return inner(*given, **more)

        torch.distributed.all_gather_into_tensor = noted

    def unwatch(run: Run) -> None:
        torch.distributed.all_gather_into_tensor = inner

    callbacks = [LambdaCallback(on_log=watch), WeightHistograms(), LambdaCallback(on_log=unwatch)]
    options: Any = {"strategy": "fsdp", "devices": 2, "max_steps": 1, "loggers": Kept()}
    quiet(**options, callbacks=callbacks).fit(Layers(), pairs(8))
    return gathered


def test_nothing_is_gathered_from_shards() -> None:
    assert on_two_ranks(gathered_at_a_log_point) == [[], []]


def event_histograms(directory: Path) -> dict[str, list[Any]]:
    reader = EventAccumulator(str(directory), size_guidance={"histograms": 0})
    reader.Reload()
    return {tag: reader.Histograms(tag) for tag in reader.Tags()["histograms"]}


def test_tensorboard_shows_what_its_own_writer_shows(tmp_path: Path) -> None:
    task = Layers()
    options: Any = {"max_steps": 1, "loggers": "tensorboard", "run_dir": tmp_path / "ours"}
    quiet(**options, callbacks=[WeightHistograms(bins=9)]).fit(task, pairs())
    writer = SummaryWriter(str(tmp_path / "theirs"))
    for name, each in task.named_parameters():
        values = each.detach().numpy()
        # `bins=9` fails in the writer with numpy 2 for a tensor of one value, as a scalar is.
        edges = np.histogram_bin_edges(values, 9)
        writer.add_histogram(f"weights/{name}", values, 1, bins=edges)
    writer.close()
    ours, theirs = event_histograms(tmp_path / "ours"), event_histograms(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for tag, (each,) in ours.items():
        (their,) = theirs[tag]
        mine, other = each.histogram_value, their.histogram_value
        assert each.step == their.step == 1
        assert (mine.min, mine.max, mine.num) == (other.min, other.max, other.num)
        assert mine.sum == pytest.approx(other.sum, abs=1e-6)
        assert mine.sum_squares == pytest.approx(other.sum_squares, rel=1e-6)
        # Theirs leaves out empty buckets at both ends.
        filled = [count for count in mine.bucket if count], [count for count in other.bucket if count]
        assert filled[0] == filled[1]
        start = mine.bucket.index(filled[0][0]) - 1
        limits = mine.bucket_limit[start:][: len(other.bucket_limit)]
        assert limits == pytest.approx(other.bucket_limit, rel=1e-6, abs=1e-7)


def test_json_lines_hold_them_and_the_history_leaves_them_out(tmp_path: Path) -> None:
    options: Any = {"max_steps": 4, "log_every": "2 steps", "loggers": "jsonl", "run_dir": tmp_path}
    callbacks = [WeightHistograms(bins=3, patterns="line.weight")]
    result = quiet(**options, callbacks=callbacks).fit(Regression(), pairs())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "train/loss"], ["step", "histograms"]] * 2
    stored = rows[1]["histograms"]["weights/line.weight"]
    assert len(stored["edges"]) == 4
    assert sum(stored["counts"]) == 4
    assert result.history == [{"step": 2, "train/loss": rows[0]["train/loss"]}, rows[2]]


def test_a_logger_without_histograms_is_named_once(tmp_path: Path) -> None:
    options = {"max_steps": 4, "log_every": 1, "loggers": ("csv", "jsonl"), "run_dir": tmp_path}
    with heard("histograms", logging.INFO) as texts:
        quiet(**options, callbacks=[WeightHistograms()]).fit(Regression(), pairs())
    assert texts == ["WeightHistograms: CSVLogger takes no histograms, and gets none"]


def test_log_histogram_is_for_log_points_and_try_out_has_none() -> None:
    histogram = Histogram([0.0, 1.0], [1], 0.0, 1.0, 1.0, 1.0)
    early = LambdaCallback(on_step_end=lambda run: run.log_histogram("mine", histogram))
    with pytest.raises(ConfigError, match=r"run.log_histogram\('mine', ...\) is for on_log"):
        quiet(max_steps=1, callbacks=[early]).fit(Regression(), pairs())
    quiet(max_steps=1, try_out="batches", callbacks=[WeightHistograms()]).fit(Regression(), pairs())
