"""Copies of a module's buffers, to undo the changes of an attempt."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class KeptBuffers:
    """Copies of a module's buffers and of its tables of buffers."""

    def __init__(self) -> None:
        self._tables: list[tuple[nn.Module, dict[str, Tensor | None], set[str]]] = []
        self._copied: list[tuple[nn.Module, Tensor]] = []
        self._copies: list[Tensor] = []

    def keep(self, module: nn.Module, but: type[nn.Module] | None = None) -> None:
        """Copy the buffers as they are now; lazy ones have no values yet."""
        # A forward may replace or add a tensor, so the tables are copied too.
        self._tables = [
            (each, dict(each._buffers.items()), set(each._non_persistent_buffers_set))
            for each in module.modules()
            if but is None or not isinstance(each, but)
        ]
        copied = [
            (owner, each)
            for owner, buffers, _ in self._tables
            for each in buffers.values()
            if each is not None
        ]
        if [id(each) for _, each in copied] != [id(each) for _, each in self._copied]:
            self._copies = [each.detach().clone() for _, each in copied]
        elif copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, [each for _, each in copied])
        self._copied = copied

    def put_back(self, hide_from_autograd: bool = False) -> None:
        """Restore the buffers and their tables; buffers registered since are removed.

        Args:
            hide_from_autograd: Whether autograd ignores the change. Otherwise it raises torch's error in the
                backward of a loss whose graph holds a restored buffer.
        """
        for owner, buffers, passing in self._tables:
            if isinstance(owner._buffers, dict):  # a scripted module has another table, and keeps its buffers
                owner._buffers.clear()
                owner._buffers.update(buffers)
                owner._non_persistent_buffers_set = set(passing)
        with torch.no_grad():
            for (owner, tensor), copy in zip(self._copied, self._copies, strict=True):
                # A norm's graph holds running statistics, but its gradients do not depend on them.
                (tensor.data if hide_from_autograd or isinstance(owner, _NormBase) else tensor).copy_(copy)
