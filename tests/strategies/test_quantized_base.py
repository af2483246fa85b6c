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

FEATURES = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(FEATURES, FEATURES.sum(1, keepdim=True) / 11)


def by_torchao(layer: nn.Linear, is_quantized: bool) -> nn.Module:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = nf4.to_nf4(layer.weight.detach(), 64, 64)
    layer.weight = nn.Parameter(weight if is_quantized else weight.to(torch.float32), False)
    return layer


def by_bitsandbytes(layer: nn.Linear, is_quantized: bool) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made: Any = bnb.nn.Linear4bit(128, 128, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    made.weight = bnb.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4")
    made.to("cpu")  # which quantises
    weight = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
    layer.weight = nn.Parameter(weight, False)
    return made if is_quantized else layer


class Adapted(TaskModule):
    def __init__(self, quantize: Any, is_quantized: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        base = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU()) for _ in range(2)))
        for block in base:
            block[0] = quantize(block[0], is_quantized)
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
    folder: Path,
    strategy: str,
    size: int,
    quantize: Any,
    is_quantized: bool = True,
    steps: int = 4,
    **resume: Any,
) -> Any:
    """Return the gradients of the first step and the trained weights."""
    gradients: list[dict[str, Tensor]] = []

    def note(run: Any) -> None:
        named = run.task.named_parameters()
        gradients.append({n: run.full_tensor(each.grad).clone() for n, each in named if each.requires_grad})

    only = CheckpointConfig(every="2 steps", by=None, parameters="trainable")
    look, task = LambdaCallback(on_before_optimizer_step=note), Adapted(quantize, is_quantized)
    options = {
        "strategy": strategy,
        "devices": size,
        "checkpoint": only,
        "run_dir": folder,
        "callbacks": [look],
    }
    quiet(max_steps=steps, **options).fit(task, DataLoader(DATA, batch_size=4 // size), **resume)
    return gradients[0], {n: each.detach() for n, each in task.named_parameters() if each.requires_grad}


def _resumed(folder: Path, strategy: str, size: int, quantize: Any) -> Any:
    gradients, trained = fitted(folder / "straight", strategy, size, quantize)
    fitted(folder / "run", strategy, size, quantize, steps=2)
    _, resumed = fitted(folder / "run", strategy, size, quantize, resume="auto")
    assert all(torch.equal(each, trained[name]) for name, each in resumed.items())
    return gradients


@pytest.mark.nightly
def test_adapters_on_a_base_of_bitsandbytes_have_them_too_on_one_process_and_by_ddp(
    tmp_path: Path,
) -> None:
    expected, _ = fitted(tmp_path / "dequantised", "cpu", 1, by_bitsandbytes, is_quantized=False)
    found, _ = fitted(tmp_path / "one", "cpu", 1, by_bitsandbytes)
    (on_two, _), _ = on_two_ranks(fitted, tmp_path / "two", "ddp", 2, by_bitsandbytes)
    torch.testing.assert_close([found, on_two], [expected] * 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["cpu", "ddp", "fsdp"])
def test_adapters_on_a_base_in_nf4_have_gradients_of_the_whole_base(strategy: str, tmp_path: Path) -> None:
    expected, _ = fitted(tmp_path / "dequantised", "cpu", 1, by_torchao, is_quantized=False)
    given = (tmp_path, strategy, 1 if strategy == "cpu" else 2, by_torchao)
    found = _resumed(*given) if strategy == "cpu" else on_two_ranks(_resumed, *given)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(name.startswith("head.") or ".lora_" in name for name in stored)
    assert len(stored) == len(expected)
