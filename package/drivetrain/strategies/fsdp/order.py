"""The order in which ranks gather weights and reduce gradients, seen through FSDP2's own communication hooks.

`fully_shard` matches the shards of ranks by the order of its collectives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from drivetrain.distributed.collective_order import CollectiveOrder
from drivetrain.distributed.ranks import Ranks
from drivetrain.strategies.unused import part_order

# torch 2.13 warns about the names of torch 2.9.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter: Any = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


class ShardOrder:
    """Checks that all ranks gather and reduce the same parts of sharded modules, in the same order.

    Args:
        ranks: All ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._order = part_order(ranks)
        self._models = 0
        self._parts: list[_Part] = []
        self._handles: list[Any] = []
        self._synchronized = True

    def add(self, module: nn.Module) -> None:
        """Check a module that was sharded just now; all ranks add the same ones."""
        self._models += 1
        which = "" if self._models == 1 else f" of model {self._models}"
        for name, each in module.named_modules():
            if isinstance(each, FSDPModule):
                name = name.removeprefix("task").removeprefix(".")
                name = repr(name) if name else "what is outside the blocks"
                self._parts.append(_Part(each, f"{name}{which}", self._order))
        self._handles.append(module.register_forward_pre_hook(self._begin_forward, prepend=True))
        self._handles.append(module.register_forward_hook(self._end_forward))

    def synchronize(self, last: bool) -> None:
        """Note whether the next backward reduces gradients."""
        self._synchronized = last

    def _begin_forward(self, *_: Any) -> None:
        kind = "forward" if torch.is_grad_enabled() else "evaluation"
        self._order.begin((kind, self._synchronized))

    def _end_forward(self, *_: Any) -> None:
        self._order.next("ends the forward")

    def begin_backward(self) -> None:
        """Note that a backward begins."""
        for each in self._parts:
            if not each.is_recording:
                each.record()
        self._order.begin(("backward", self._synchronized))

    def end_backward(self) -> None:
        """Check that the others, too, have reduced all that they reduce in this backward."""
        self._order.next("ends the backward")

    def close(self) -> None:
        """End the check, and remove its hooks."""
        self._order.close()
        for handle in self._handles:
            handle.remove()
        for part in self._parts:
            part.stop()


class _Part:
    """A module whose parameters are gathered together.

    Attributes:
        is_recording: Whether it records which of its parameters have got a gradient.
    """

    def __init__(self, module: Any, name: str, order: CollectiveOrder) -> None:
        self.is_recording = False
        self._group = module._get_fsdp_state()._fsdp_param_group
        self._used: set[Tensor] = set()
        self._parameters: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        if self._group is None:
            self.is_recording = True
            return
        self._gathers = f"gathers the weights of {name}"
        self._reduces = f"reduces the gradients of {name}"
        self._order = order
        module.set_custom_all_gather(_Gather(self))
        module.set_custom_reduce_scatter(_Reduce(self))

    def record(self) -> None:
        """Record from now on which gathered parameters get gradients, once they have been gathered."""
        parameters = self._group.fsdp_params
        if not all(hasattr(each, "_unsharded_param") for each in parameters):
            return
        whole = [(each._param_fqn.removeprefix("task."), each._unsharded_param) for each in parameters]
        known = {id(each) for _, each in self._parameters}
        self._parameters = [(name, each) for name, each in whole if each.requires_grad]
        for _, each in self._parameters:
            if id(each) not in known:
                hooked: Any = each
                self._hooks.append(hooked.register_post_accumulate_grad_hook(self._used.add))
        self.is_recording = len(self._parameters) == len(whole)  # others may be unfrozen later

    def gathers(self) -> None:
        self._order.next(self._gathers)

    def reduces(self) -> None:
        missing = ""
        if len(self._used) < len(self._parameters):
            names = [name for name, each in self._parameters if each.requires_grad and each not in self._used]
            missing = f", without those of {', '.join(map(repr, names))}" if names else ""
        self._used.clear()
        self._order.next(self._reduces + missing)

    def stop(self) -> None:
        """Remove the hooks."""
        for each in self._hooks:
            each.remove()


class _Allocating:
    def __init__(self, part: _Part) -> None:
        self._part = part

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        self._part.gathers()
        work: distributed.Work | None = _all_gather(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work


class _Reduce(_Allocating):
    """A reduce-scatter. With shards of one rank torch only allocates for it, before it reduces over replicas:
    so the first of its two allocations is what is checked.
    """

    _allocates = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        self._allocates = not self._allocates
        if self._allocates:
            self._part.reduces()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> distributed.Work | None:
        work: distributed.Work | None = _reduce_scatter(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work
