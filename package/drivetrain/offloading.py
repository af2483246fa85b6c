"""Activations that wait for their backward in the host's memory.

Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
MICRO 2016; realised by torch's hooks on what a graph saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Packed = tuple[torch.device, Tensor] | Tensor
"""What a graph holds: a tensor in the host's memory with the device that it is of, or the tensor itself."""


class Offload:
    """Takes the large tensors that a forward saves to the host, and back when its backward needs them.

    Copies to a GPU and from it run beside the host, through pinned memory. Parameters and buffers stay where
    they are, for they would be there anyway.

    Args:
        model: Whose parameters and buffers stay.
        at_least: The bytes of a tensor that is worth it.
        pinned: Whether the host's memory is pinned.
    """

    def __init__(self, model: nn.Module, at_least: int, pinned: bool) -> None:
        self._model = model
        self._at_least = at_least
        self._pinned = pinned
        self._resident: set[int] = set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The context of a forward."""
        if not torch.is_grad_enabled():
            yield
            return
        held = (*self._model.parameters(), *self._model.buffers())
        self._resident = {each.untyped_storage().data_ptr() for each in held}
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Packed:
        """What is kept of a tensor that forward has saved."""
        if (
            tensor.nbytes < self._at_least
            or tensor.layout != torch.strided
            or tensor.untyped_storage().data_ptr() in self._resident
        ):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=self._pinned)

    def unpack(self, packed: Packed) -> Tensor:
        """The tensor on its device."""
        if isinstance(packed, Tensor):
            return packed
        device, tensor = packed
        return tensor.to(device, non_blocking=self._pinned)


def within(
    offload: Offload, context: Callable[[], AbstractContextManager[object]] | None
) -> Callable[[], AbstractContextManager[object]]:
    """The context of a step in which activations are offloaded, too."""
    if context is None:
        return offload

    @contextmanager
    def both() -> Iterator[None]:
        with context(), offload():
            yield

    return both
