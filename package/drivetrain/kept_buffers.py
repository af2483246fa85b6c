"""A module's buffers, kept so that what an attempt did to them can be undone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


class KeptBuffers:
    """Copies of the buffers of a module, and of the tables in which they stand."""

    def __init__(self) -> None:
        self._tables: list[tuple[nn.Module, dict[str, Tensor | None], set[str]]] = []
        self._copied: list[tuple[nn.Module, Tensor]] = []
        self._copies: list[Tensor] = []

    def keep(self, module: nn.Module, but: type[nn.Module] | None = None) -> None:
        """Copy them as they are now; those that are still lazy have no values.

        Args:
            module: Whose.
            but: Modules whose own buffers are left out.
        """
        # A forward may put another tensor in the place of one, or of none: the tables go along.
        self._tables = [
            (each, dict(each._buffers.items()), set(each._non_persistent_buffers_set))
            for each in module.modules()
            if but is None or not isinstance(each, but)
        ]
        copied = [
            (owner, each)
            for owner, buffers, _ in self._tables
            for each in buffers.values()
            if each is not None and not is_lazy(each)
        ]
        if [id(each) for _, each in copied] != [id(each) for _, each in self._copied]:
            self._copies = [each.detach().clone() for _, each in copied]
        elif copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, [each for _, each in copied])
        self._copied = copied

    def put_back(self, unseen: bool = False) -> None:
        """Make them what they were, where they were; those that were registered since are gone.

        Args:
            unseen: By autograd, which otherwise refuses, with torch's error, the backward of a loss whose
                graph holds a buffer that is put back.
        """
        for owner, buffers, passing in self._tables:
            if isinstance(owner._buffers, dict):  # and no scripted module's, which stand where they stood
                owner._buffers.clear()
                owner._buffers.update(buffers)
                owner._non_persistent_buffers_set = set(passing)
        with torch.no_grad():
            for (owner, tensor), copy in zip(self._copied, self._copies, strict=True):
                # Running statistics are held by a norm's graph, but are nothing to its gradients.
                (tensor.data if unseen or isinstance(owner, _NormBase) else tensor).copy_(copy)
