"""Dynamic loss scaling for training in float16, for strategies whose library does not bring its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.core.errors import StrategyError

_SMALLEST = 2.0**-14
"""The smallest normal number of float16. A smaller scale would cost digits: in the gradient of the loss, and
with several optimizers in the gradients of those that do not overflow."""


class _Scaler(torch.amp.GradScaler):
    """A scaler that checks the local shards: torch cannot check sharded and whole gradients together."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *others: Any) -> Any:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(hasattr(each, "to_local") for each in parameters):
            parameters = [_local(each) for each in parameters]
            optimizer = SimpleNamespace(param_groups=[{"params": parameters}])
        gradients = {each.grad.device.type for each in parameters if each.grad is not None}
        if inv_scale.device.type == "cuda" and "cpu" in gradients:
            # Offloaded gradients. torch would copy both numbers to the host without waiting for them, and
            # read them before they are there. Here they are copied once, and that is waited for.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, *others)


def _local(parameter: Any) -> Tensor:
    """Return the local shard of a parameter, with the local shard of its gradient."""
    gradient = parameter.grad
    if gradient is None or not hasattr(parameter, "to_local"):
        return parameter  # type: ignore[no-any-return]
    local: Tensor = parameter.detach().to_local()
    local.grad = gradient.to_local()
    return local


class LossScale:
    """A gradient scaler that reports whether a step overflowed.

    Args:
        agree: A function that combines the number of overflows (0-d) over all ranks, in place; None if every
            rank has the same gradients.
    """

    def __init__(self, device: torch.device, agree: Callable[[Tensor], object] | None = None) -> None:
        self._scaler = _Scaler(device.type)
        self._agree = agree
        # The scaler creates its scale at the first loss, and a step of weight zero has no loss.
        self._scaler.scale(torch.zeros((), device=device))

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, and record whether one is infinite or NaN."""
        self._scaler.unscale_(optimizer)

    def discard(self, optimizer: Optimizer) -> None:
        """Forget the recorded overflows of a step that is skipped."""
        self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether the unscaled gradients overflowed, and update the scale; takes one host sync.

        Raises:
            StrategyError: They overflowed at the smallest scale.
        """
        # GradScaler.step does not report whether it stepped, and fused optimizers decide on the device.
        found = list(self._scaler._found_inf_per_device(optimizer).values())
        if self._agree is not None:
            for each in found:
                self._agree(each)
        overflowed = any(bool(each.item()) for each in found)
        if overflowed and self._scaler.get_scale() <= _SMALLEST:
            raise StrategyError(
                f"gradients overflow even at the smallest loss scale, {_SMALLEST:g}, so the scale is not the"
                " cause. Use 'bf16-mixed', a lower learning rate, or look for infinities in the model"
            )
        # Updated before another optimizer's backward, which then uses the new scale. So one optimizer may
        # be applied more than once in a step, and an overflow of the first does not affect the second.
        self._step()
        return overflowed

    def _step(self) -> None:
        states = self._scaler._per_optimizer_states.values()
        if any(state["found_inf_per_device"] for state in states):
            self._scaler.update()
        else:  # no parameter had a gradient, which GradScaler would raise as an error
            self._scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(dict(state))
