"""One process, one device: CPU, CUDA or MPS by the same code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import StrategyError
from drivetrain.precision import Precision
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy, Support
from drivetrain.strategies.stepping import step
from drivetrain.task import StepModule

_OVERFLOWS_IN_A_ROW = 100
"""Skipped updates in a row for which no loss scale can be the cause: 2**16 halved 100 times is 5e-26."""


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

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = _existing(device)
        self.name = "single"
        self._scaler: torch.amp.GradScaler | None = None
        self._overflows = 0

    def supports(self, precision: Precision) -> Support:
        """All built-in precisions on the CPU; MPS has no float64; bfloat16 needs hardware that has it."""
        dtypes = (precision.param_dtype, precision.compute_dtype)
        if self.device.type == "mps" and torch.float64 in dtypes:
            return Support(
                False,
                "MPS has no float64; allowed are '32', 'bf16-mixed', '16-mixed', 'bf16-true' and '16-true'",
            )
        if self.device.type == "cuda" and torch.bfloat16 in dtypes and not torch.cuda.is_bf16_supported():
            return Support(False, "this GPU has no bfloat16; use '16-mixed' or '32'")
        return Support(True)

    def prepare(
        self, module: StepModule, make_optimizers: MakeOptimizers | None, precision: Precision
    ) -> Prepared:
        """Convert, move, then make the optimizers on the parameters where they now are."""
        precision.convert_module(module)
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        self._scaler = torch.amp.GradScaler(self.device.type) if precision.loss_scaling else None
        if self._scaler is not None:
            # It makes its scale when it first sees a loss; an update of weight zero shows it none.
            self._scaler.scale(torch.zeros((), device=self.device))
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient: a product and its backward would take 6 us."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        root = None if share is None else torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, unless an unscaled gradient overflowed; knowing that takes one host sync, under loss scaling
        only, after which the loss scale grows or shrinks.
        """
        if self._scaler is not None:
            overflowed = self._overflowed(self._scaler, optimizer)
            # Before another optimizer's backward, which then has the new scale: so one optimizer may step
            # more than once in an update, and an overflow of the first does not reach the second.
            _update_scale(self._scaler)
            if overflowed:
                return False
        step(optimizer)
        return True

    def _overflowed(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
        # GradScaler.step would hide whether it stepped, and has fused optimizers decide on the device.
        found = scaler._found_inf_per_device(optimizer).values()
        overflowed = any(bool(each.item()) for each in found)
        self._overflows = self._overflows + 1 if overflowed else 0
        if self._overflows >= _OVERFLOWS_IN_A_ROW:
            raise StrategyError(
                f"{_OVERFLOWS_IN_A_ROW} updates in a row were skipped because gradients overflowed; the loss"
                f" scale is down to {scaler.get_scale():g}, so the scale is not the cause. Use 'bf16-mixed',"
                " a lower learning rate, or look for infinities in the model"
            )
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its growth counter."""
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a loss scale; one saved under another precision is left alone."""
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))


def _update_scale(scaler: torch.amp.GradScaler) -> None:
    states = scaler._per_optimizer_states.values()
    if any(state["found_inf_per_device"] for state in states):
        scaler.update()
    else:  # no parameter had a gradient: GradScaler calls that an error, and nothing is learned of the scale
        scaler._per_optimizer_states.clear()
