"""Every precision trains on a GPU, in the types that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.test_training import STRATEGIES, Classifier, loader, needs_gpu, trainer
from torch import Tensor

from drivetrain.strategies.precision.registry import as_precision

PRECISIONS = ["32", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "fp8"]


def able(precision: str, device: str) -> None:
    """Skip what the device or the installed packages cannot do, with the reason."""
    if precision == "fp8":
        pytest.importorskip("torchao", reason="fp8 needs torchao, which is not installed")
    obstacle = as_precision(precision).obstacle(torch.device(device))
    if obstacle:
        pytest.skip(obstacle)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_trains_in_its_types(precision: str, device: str) -> None:
    able(precision, device)
    task, types = Classifier(), []
    task.register_forward_hook(lambda module, inputs, outputs: types.append(outputs.dtype))
    made = trainer(strategy=device, precision=precision, max_epochs=6)
    before = made.validate(task, loader())["validation/loss"]
    made.fit(task, loader())
    after = made.validate(task, loader())["validation/loss"]
    assert after < before * 0.9
    computed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "bf16-true": torch.bfloat16}
    if precision in computed:
        assert types[-1] == computed[precision]
    kept = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {each.dtype for each in task.parameters()} == {kept}


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_strategies_train_in_lower_precision(strategy: str, precision: str, device: str) -> None:
    able(precision, device)
    task = Classifier()
    made = trainer(strategy=strategy, devices=1, precision=precision, max_epochs=6)
    result = made.fit(task, loader(), loader())
    assert result.metrics["validation/loss"] < 1.5


def test_an_update_whose_gradient_overflows_is_skipped(device: str) -> None:
    able("16-mixed", device)

    class Spiky(Classifier):
        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            self.updates = getattr(self, "updates", 0) + 1
            return super().loss(outputs, batch) * (1e30 if self.updates == 2 else 1.0)

    task = Spiky()
    trainer(strategy=device, precision="16-mixed").fit(task, loader())
    assert all(bool(torch.isfinite(each).all()) for each in task.parameters())
