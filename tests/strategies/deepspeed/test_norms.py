"""DeepSpeed beside what is not in its parameters' dtype: norms in float32, and what is in 16 bits anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DeepSpeedConfig, OptimizerConfig, TaskModule
from drivetrain.checkpoint import load_weights
from drivetrain.strategies.ddp import DDP
from drivetrain.testing import run_distributed

deepspeed = pytest.importorskip("deepspeed")
from drivetrain.strategies.deepspeed.library import library  # noqa: E402
from drivetrain.strategies.deepspeed.strategy import DeepSpeed  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


class Mixture(TaskModule):
    """A frozen part in 16 bits, and norms, of which the first gets inputs in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(8))
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.inner(self.first(self.given(x)))
        frozen = self.frozen(middle.bfloat16()).to(middle.dtype)
        out: Tensor = self.last(frozen.tanh())
        return out.float()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=1e-2)


def fitted(strategy: Any, precision: str, **options: Any) -> Mixture:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    task = Mixture()
    trainer = quiet(strategy=strategy, precision=precision, max_epochs=1, **options)
    trainer.fit(task, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return task


def _mixture(path: str) -> None:
    before = Mixture()
    for precision in ("32", "bf16-mixed"):
        expected = fitted(DDP(world_size=2), precision).state_dict()
        tolerance = 1e-5 if precision == "32" else 5e-3
        for stage in (1, 3):
            directory = f"{path}/{precision}-{stage}"
            strategy = DeepSpeed(DeepSpeedConfig(stage=stage), world_size=2)
            task = fitted(strategy, precision, checkpoint=True, run_dir=directory)
            for name, each in task.state_dict().items():
                torch.testing.assert_close(each, expected[name], atol=tolerance, rtol=0.0)
            assert not torch.equal(task.inner.weight, before.inner.weight)
            assert not any(each._forward_hooks or each._forward_pre_hooks for each in task.modules())
            stored = load_weights(directory)
            assert torch.equal(stored["frozen.weight"], before.frozen.weight)
            assert stored["frozen.weight"].dtype == torch.bfloat16
            assert stored["inner.running_mean"].dtype == torch.float32


def test_norms_compute_in_float32_and_a_frozen_part_in_16_bits_is_stored_as_it_is(tmp_path: Path) -> None:
    library("cpu")  # once, of which both processes are copies
    run_distributed(_mixture, str(tmp_path))
