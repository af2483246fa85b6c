"""Adapters on a base in NF4: under every strategy their gradients are those over the dequantised base."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule

nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

FEATURES = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(FEATURES, FEATURES.sum(1, keepdim=True) / 11)


class Adapted(TaskModule):
    def __init__(self, is_quantized: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU()) for _ in range(2)))
        for block in base:
            weight = nf4.to_nf4(block[0].weight.detach(), 64, 64)
            block[0].weight = nn.Parameter(weight if is_quantized else weight.to(torch.float32), False)
        self.net = peft.get_peft_model(
            base, peft.LoraConfig(target_modules=["0.0", "1.0"], init_lora_weights=False)
        )
        self.head = nn.Linear(128, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.net(features))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def fitted(
    folder: Path, strategy: str, size: int, is_quantized: bool = True, steps: int = 4, **resume: Any
) -> Any:
    """Return the gradients of the first step and the trained weights."""
    gradients: list[dict[str, Tensor]] = []

    def note(run: Any) -> None:
        named = run.task.named_parameters()
        gradients.append({n: run.full_tensor(each.grad).clone() for n, each in named if each.requires_grad})

    only = CheckpointConfig(every="2 steps", by=None, parameters="trainable")
    look, task = LambdaCallback(on_before_optimizer_step=note), Adapted(is_quantized)
    options = {
        "strategy": strategy,
        "devices": size,
        "checkpoint": only,
        "run_dir": folder,
        "callbacks": [look],
    }
    quiet(max_steps=steps, **options).fit(task, DataLoader(DATA, batch_size=4 // size), **resume)
    return gradients[0], {n: each.detach() for n, each in task.named_parameters() if each.requires_grad}


def _resumed(folder: Path, strategy: str, size: int) -> Any:
    gradients, trained = fitted(folder / "straight", strategy, size)
    fitted(folder / "run", strategy, size, steps=2)
    _, resumed = fitted(folder / "run", strategy, size, resume="auto")
    assert all(torch.equal(each, trained[name]) for name, each in resumed.items())
    return gradients


@pytest.mark.parametrize("strategy", ["cpu", "ddp", "fsdp"])
def test_adapters_on_a_base_in_nf4_have_the_gradients_of_the_dequantised_base(
    strategy: str, tmp_path: Path
) -> None:
    expected, _ = fitted(tmp_path / "dequantised", "cpu", 1, is_quantized=False)
    arguments = (tmp_path, strategy)
    found = _resumed(*arguments, 1) if strategy == "cpu" else on_two_ranks(_resumed, *arguments, 2)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(name.startswith("head.") or ".lora_" in name for name in stored)
    assert len(stored) == len(expected)
