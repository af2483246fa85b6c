"""Every precision trains on a GPU, in the types that it names."""

import pytest
import torch
from tests.gpu.test_training import Classifier, loader, trainer

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
