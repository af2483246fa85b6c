"""A module's buffers, kept so that what an attempt did to them can be undone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class KeptBuffers:
    """Copies of the buffers of a module, and where in it they stood."""

    def __init__(self) -> None:
        self._owners: list[nn.Module] = []
        self._places: list[tuple[nn.Module, str, Tensor | None]] = []
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []

    def keep(self, module: nn.Module, but: type[nn.Module] | None = None) -> None:
        """Copy them as they are now; those that are still lazy have no values.

        Args:
            module: Whose.
            but: Modules whose own buffers are left out.
        """
        self._owners = [each for each in module.modules() if but is None or not isinstance(each, but)]
        # Where they stand goes along: a forward may put another tensor in the place of one, or of none.
        self._places = [
            (owner, name, buffer) for owner in self._owners for name, buffer in owner._buffers.items()
        ]
        tensors = [each for *_, each in self._places if each is not None and not is_lazy(each)]
        if [id(each) for each in tensors] != [id(each) for each in self._tensors]:
            self._copies = [each.detach().clone() for each in tensors]
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, tensors)
        self._tensors = tensors

    def put_back(self) -> None:
        """Make them what they were, where they were; those that were registered since are gone."""
        stood = {(id(owner), name) for owner, name, _ in self._places}
        for owner in self._owners:
            for name in [name for name in owner._buffers if (id(owner), name) not in stood]:
                delattr(owner, name)
        for owner, name, buffer in self._places:
            owner._buffers[name] = buffer
        # As `data`, or autograd would refuse the graph of a loss that is still to be led back, such as one
        # that a generator step yields next: its numbers would have changed.
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.data.copy_(copy)
