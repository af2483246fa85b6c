"""A module's buffers, kept so that what an attempt did to them can be undone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class KeptBuffers:
    """Copies of the buffers of a module, and where in it they stood."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def keep(self, module: nn.Module, but: type[nn.Module] | None = None) -> None:
        """Copy them as they are now; those that are still lazy have no values.

        Args:
            module: Whose.
            but: Modules whose own buffers are left out.
        """
        # Where they stand goes along: a forward may put another tensor in a buffer's place.
        found = [
            (owner, name, buffer)
            for owner in module.modules()
            if but is None or not isinstance(owner, but)
            for name, buffer in owner._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        if [id(buffer) for _, _, buffer in found] != [id(buffer) for _, _, buffer, _ in self._kept]:
            self._kept = [(*each, each[2].detach().clone()) for each in found]
            return
        if found:
            with torch.no_grad():
                torch._foreach_copy_([copy for *_, copy in self._kept], [buffer for *_, buffer in found])

    def put_back(self) -> None:
        """Make them what they were, where they were."""
        # As `data`, or autograd would refuse the graph of a loss that is still to be led back, such as one
        # that a generator step yields next: its numbers would have changed.
        with torch.no_grad():
            for owner, name, buffer, copy in self._kept:
                buffer.data.copy_(copy)
                owner._buffers[name] = buffer
