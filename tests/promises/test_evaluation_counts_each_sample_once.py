"""An evaluation counts each sample once, on any number of ranks and with batches of any size."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.promises.example import QUIET, Line, batches, samples
from tests.support.ranks import on_two_ranks
from torch import Tensor

from drivetrain import EpochMetric, Trainer


class Judged(Line):  # judges the numbers of the samples
    def metrics(self) -> dict[str, Any]:
        return {"numbers": EpochMetric(lambda outputs, them: {"count": len(them), "sum": float(them.sum())})}

    def metric_inputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return outputs, batch["number"]


def evaluated(devices: int, size: int) -> dict[str, float]:
    strategy = "ddp" if devices > 1 else "cpu"
    trainer = Trainer(strategy=strategy, devices=devices, checkpoint=False, **QUIET)
    return dict(trainer.validate(Judged(), batches(13, size)))


def test_an_evaluation_counts_each_sample_once() -> None:
    x, y = (torch.stack([each[name] for each in samples(13)]) for name in ("x", "y"))
    expected = {
        "validation/loss": (Line()(x) - y).square().mean().item(),
        "validation/numbers/count": 13,
        "validation/numbers/sum": sum(range(13)),
    }
    for size in (3, 4, 13):  # the last batches differ; with 3, a rank has none left
        assert evaluated(1, size) == pytest.approx(expected)
        for found in on_two_ranks(evaluated, 2, size):
            assert found == pytest.approx(expected)
