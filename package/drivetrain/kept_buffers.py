"""A module's buffers, kept so that what an attempt did to them can be undone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


class _Place(NamedTuple):
    owner: nn.Module
    name: str
    buffer: Tensor | None
    persistent: bool


class KeptBuffers:
    """Copies of the buffers of a module, and where in it they stood."""

    def __init__(self) -> None:
        self._owners: list[nn.Module] = []
        self._places: list[_Place] = []
        self._copied: list[tuple[nn.Module, Tensor]] = []
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
            _Place(owner, name, buffer, name not in owner._non_persistent_buffers_set)
            for owner in self._owners
            for name, buffer in owner._buffers.items()
        ]
        copied = [(o, each) for o, _, each, _ in self._places if each is not None and not is_lazy(each)]
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
        stood = {(id(owner), name) for owner, name, *_ in self._places}
        for owner in self._owners:
            if isinstance(owner._buffers, dict):  # and no scripted module's, which stand where they stood
                for name in [name for name in owner._buffers if (id(owner), name) not in stood]:
                    delattr(owner, name)
        for owner, name, buffer, persistent in self._places:
            if isinstance(owner._buffers, dict):
                _place(owner, name, buffer, persistent)
        with torch.no_grad():
            for (owner, tensor), copy in zip(self._copied, self._copies, strict=True):
                # Running statistics are held by a norm's graph, but are nothing to its gradients.
                (tensor.data if unseen or isinstance(owner, _NormBase) else tensor).copy_(copy)


def _place(owner: nn.Module, name: str, buffer: Tensor | None, persistent: bool) -> None:
    if name not in owner._buffers:
        for others in (vars(owner), owner._parameters, owner._modules):
            others.pop(name, None)
        if not persistent:
            owner._non_persistent_buffers_set.add(name)
    owner._buffers[name] = buffer
