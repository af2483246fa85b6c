"""Every precision trains on a GPU, in the types that it names."""

from typing import Any

import pytest
import torch
from tests.gpu.test_training import Classifier, loader, needs_gpu, trainer
from torch import Tensor

from drivetrain import FSDPConfig, LambdaCallback, NonFiniteError
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


def test_fp8_takes_batches_of_any_number_of_rows(device: str) -> None:
    able("fp8", device)
    trainer(strategy=device, precision="fp8", max_epochs=1).fit(Classifier(), loader(5))


class Overflowing(Classifier):  # has one gradient that is infinite, in its third step
    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = super().loss(outputs, batch)
        return loss * float("inf") if self.progress.steps == 2 else loss


def test_overflow_of_offloaded_gradients_is_seen(device: str) -> None:
    """The scale and the flag are copied to where the gradients are, and must be there when they are read."""
    kept: list[Tensor] = []
    look = LambdaCallback(on_step_end=lambda run: kept.append(run.full_tensor(run.task.net[4].weight).cpu()))
    offloaded = FSDPConfig(cpu_offload=True)
    made = trainer(strategy=offloaded, devices=1, precision="16-mixed", callbacks=[look])
    with pytest.raises(NonFiniteError):  # no scale makes that loss finite
        made.fit(Overflowing(), loader())
    assert len(kept) >= 2
    assert all(each.isfinite().all() for each in kept)


@needs_gpu
@pytest.mark.parametrize("options", [{"precision": "tf32"}, {"precision": "32"}], ids=str)
@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "reduce-overhead"])
def test_compile_modes_train_with_tf32_and_cuda_graphs(mode: str, options: dict[str, Any]) -> None:
    config = {"mode": mode, "scope": "task", "dynamic": False}
    made = trainer(strategy="cuda", compile=config, log_every="4 steps", **options)
    plain = trainer(strategy="cuda", log_every="4 steps", **options)
    found = made.fit(Classifier(), loader()).metrics["train/loss"]
    assert found == pytest.approx(plain.fit(Classifier(), loader()).metrics["train/loss"], rel=1e-2)
