"""One process, one device: CPU, CUDA or MPS by the same code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drivetrain.errors import StrategyError
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy, Support, check_values
from drivetrain.strategies.scaling import LossScale
from drivetrain.strategies.sparse import clip_grad_norm, trained_sparsely
from drivetrain.task import StepModule

_KINDS = ("cpu", "cuda", "mps")


def _existing(spec: str | torch.device) -> torch.device:
    """A device that a model can be moved to, its number included where there may be several."""
    try:
        device = torch.device(spec)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in _KINDS:
        raise StrategyError(f"a single device is 'cpu', 'cuda', 'cuda:1' or 'mps', not {spec!r}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise StrategyError(
            "device 'mps' is not available: it needs a Mac with Metal. Use strategy='cpu' or 'auto'"
        )
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise StrategyError(
            f"device {str(spec)!r} is not available: torch sees no CUDA GPU. Use strategy='cpu' or 'auto'"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if index >= count:
        raise StrategyError(
            f"device {str(spec)!r} is not there: torch sees {count} GPU(s), the last is 'cuda:{count - 1}'"
        )
    return torch.device("cuda", index)


class SingleDevice(Strategy):
    """Runs the step module as it is on one device.

    Args:
        device: "cpu", "cuda", "cuda:1" or "mps".

    Raises:
        StrategyError: It is no such device, or not there.
    """

    no_recomputation = ""
    no_release = ""
    no_micro_batch = ""
    no_skipping = ""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = _existing(device)
        self.name = "single"
        self._sparse: list[nn.Parameter] = []

    def supports(self, precision: Precision) -> Support:
        """All built-in precisions on the CPU; MPS has none of 64 or 8 bits; bfloat16 needs hardware that has
        it.
        """
        dtypes = (precision.param_dtype, precision.compute_dtype)
        lacking = [each for each in dtypes if each is not None and each.itemsize in (1, 8)]
        if self.device.type == "mps" and lacking:
            return Support(
                False,
                f"MPS has no {str(lacking[0]).removeprefix('torch.')}; allowed are '32', 'bf16-mixed',"
                " '16-mixed', 'bf16-true' and '16-true'",
            )
        if self.device.type == "cuda" and torch.bfloat16 in dtypes and not torch.cuda.is_bf16_supported():
            return Support(False, "this GPU has no bfloat16; use '16-mixed' or '32'")
        return Support(True)

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, then make the optimizers on the parameters where they now are."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        self._scale = LossScale(self.device) if precision.loss_scaling else None
        self._sparse = trained_sparsely(module.task)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient: a product and its backward would take 6 us."""
        if self._scale is not None:
            loss = self._scale.scale(loss)
        root = None if share is None else torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm."""
        return clip_grad_norm(parameters, max_norm, self._sparse)
