"""Activation offloading: activations wait in the host's memory until backward needs them.

Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design",
MICRO 2016; implemented with torch's saved-tensor hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_SAME_VALUES = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")
"""The names of operations in a graph that change a tensor's dtype or shape alone."""

Packed = tuple[torch.device, Tensor] | Tensor
"""A saved tensor as the graph holds it: moved to the host, with its original device; or unmoved."""


class Offload:
    """A context that moves large saved activations to the host, and back when backward needs them.

    Copies to and from a GPU go through pinned memory, in turn with the computation, so that the memory of a
    tensor that was moved serves the next one. Parameters and buffers are not moved, as the device keeps them
    anyway, nor are the 16-bit copies of parameters that autocast makes.
    """

    def __init__(self, model: nn.Module, at_least: int, pinned: bool) -> None:
        self._model = model
        self._at_least = at_least
        self._pinned = pinned
        self._resident: set[int] = set()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a forward with offloading."""
        if not torch.is_grad_enabled():
            yield
            return
        held = (*self._model.parameters(), *self._model.buffers())
        self._resident = {each.untyped_storage().data_ptr() for each in held}
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Packed:
        """Move a tensor that forward saved to the host, if it is large and not a parameter or buffer."""
        if (
            tensor.nbytes < self._at_least
            or tensor.layout != torch.strided
            or tensor.untyped_storage().data_ptr() in self._resident
            or _is_of_parameter(tensor)
        ):
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
        return tensor.device, host.copy_(tensor.detach(), non_blocking=self._pinned)

    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor on its original device."""
        if isinstance(packed, Tensor):
            return packed
        device, tensor = packed
        return tensor.to(device, non_blocking=self._pinned)


def _is_of_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter in another dtype or view, as autocast makes them."""
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        (node, _), *_ = node.next_functions
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def within(
    offload: Offload, context: Callable[[], AbstractContextManager[object]] | None
) -> Callable[[], AbstractContextManager[object]]:
    """Return a factory of a step's context with offloading added."""
    if context is None:
        return offload

    @contextmanager
    def both() -> Iterator[None]:
        with context(), offload():
            yield

    return both
