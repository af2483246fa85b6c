"""Histograms of weights under XLA are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.xla import apart, trainer
from torch import nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, TaskModule, Trainer
from drivetrain.callbacks import WeightHistograms


class Still(TaskModule):
    """Weights that do not move, one of them not finite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.tensor([1.0, float("nan"), -float("inf"), -2.0]))

    def training_step(self, batch: Any) -> Any:
        return {"loss": F.mse_loss(self.net(batch), batch[:, :4]) + 0 * self.unused[0]}

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1e-30)


class Kept:
    """A logger that keeps the counts it is given."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def log_metrics(self, metrics: Any, step: int) -> None: ...

    def log_histograms(self, histograms: Any, step: int) -> None:
        for name, each in histograms.items():
            self.found[f"{name} {step}"] = (list(each.counts), each.minimum, each.maximum, each.nonfinite)

    def log_config(self, config: Any) -> None: ...

    def close(self) -> None: ...


def histograms(of: Any) -> dict[str, Any]:
    kept = Kept()
    options = {"max_steps": 4, "log_every": 2, "loggers": [kept], "callbacks": [WeightHistograms()]}
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    of(**options).fit(Still(), data)
    return kept.found


@pytest.mark.parametrize(("name", "devices"), [("xla", 1), ("xla_fsdp_v2", 2)])
def test_histograms_of_weights_are_those_of_the_cpu(name: str, devices: int) -> None:
    def run() -> None:
        quiet: dict[str, Any] = {"progress_bar": False, "checkpoint": False}
        found = histograms(lambda **options: trainer(name, None, devices, **options))  # XLA is opened first
        expected = histograms(lambda **options: Trainer(strategy="cpu", **quiet, **options))
        assert expected["weights/unused 2"][3] == 2
        assert found == expected

    apart(run)
