"""The loss scale of 16-bit training, as every strategy without an engine of its own realises it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drivetrain.errors import StrategyError

_SMALLEST = 2.0**-14
"""The smallest number of float16 that has all its digits. A smaller scale takes digits from the gradient of
the loss itself, and with several optimizers from those of all that do not overflow."""


class _Scaler(torch.amp.GradScaler):
    """Looks at the shards that are here: torch has no check of sharded and whole gradients together."""

    def _unscale_grads_(self, optimizer: Any, *others: Any) -> Any:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(hasattr(each, "to_local") for each in parameters):
            optimizer = SimpleNamespace(param_groups=[{"params": [_local(each) for each in parameters]}])
        return super()._unscale_grads_(optimizer, *others)


def _local(parameter: Any) -> Tensor:
    """What is here of a parameter and its gradient."""
    gradient = parameter.grad
    if gradient is None or not hasattr(parameter, "to_local"):
        return parameter  # type: ignore[no-any-return]
    local: Tensor = parameter.detach().to_local()
    local.grad = gradient.to_local()
    return local


class LossScale:
    """A gradient scaler that says whether an update overflowed.

    Args:
        device: Where losses and gradients are.
        agree: Given the number of overflows found here (0-d), leaves in it what all ranks found; None where
            every rank has the same gradients.
    """

    def __init__(self, device: torch.device, agree: Callable[[Tensor], None] | None = None) -> None:
        self._scaler = _Scaler(device.type)
        self._agree = agree
        # It makes its scale when it first sees a loss; an update of weight zero shows it none.
        self._scaler.scale(torch.zeros((), device=device))

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, noting whether one is infinite or NaN."""
        self._scaler.unscale_(optimizer)

    def discard(self, optimizer: Optimizer) -> None:
        """Forget what was noted of gradients whose update is not made."""
        self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Whether the unscaled gradients overflowed, after which the scale grows or shrinks; one host sync.

        Raises:
            StrategyError: They did under the smallest scale.
        """
        # GradScaler.step would hide whether it stepped, and has fused optimizers decide on the device.
        found = list(self._scaler._found_inf_per_device(optimizer).values())
        if self._agree is not None:
            for each in found:
                self._agree(each)
        overflowed = any(bool(each.item()) for each in found)
        if overflowed and self._scaler.get_scale() <= _SMALLEST:
            raise StrategyError(
                f"gradients overflow however small the loss scale: it is down to {_SMALLEST:g}, so the scale"
                " is not the cause. Use 'bf16-mixed', a lower learning rate, or look for infinities in the"
                " model"
            )
        # Before another optimizer's backward, which then has the new scale: so one optimizer may step more
        # than once in an update, and an overflow of the first does not reach the second.
        self._update()
        return overflowed

    def _update(self) -> None:
        states = self._scaler._per_optimizer_states.values()
        if any(state["found_inf_per_device"] for state in states):
            self._scaler.update()
        else:  # no parameter had a gradient: GradScaler calls that an error, and nothing is learned of it
            self._scaler._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth counter."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._scaler.load_state_dict(dict(state))
