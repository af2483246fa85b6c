"""Skipping steps: the question before each optimizer's step, and the search for NaN and infinity.

A skipped step changes nothing: the optimizer is never called, so that weights, the optimizer's state and
its counts stay the same to the last bit. The forward has changed buffers by then, such as the running means
of batch norm. They are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.engine.buffers import KeptBuffers
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.updater import Updater

Refusal = Callable[[Updater, Sequence[Row]], bool]
"""Returns whether a step is skipped, given its optimizer and the scalars of its micro-batches. All ranks
call it together and get the same answer."""


class StepGate:
    """Decides before each step of an optimizer whether it is skipped.

    Attributes:
        refusals: The functions to call, in order, until one refuses.
    """

    def __init__(self, task: nn.Module) -> None:
        self.refusals: list[Refusal] = []
        self._task = task
        self._buffers = KeptBuffers()

    def begin(self) -> None:
        """Copy the buffers: before the forward, and in a generator step after each optimizer's step."""
        self._buffers.keep(self._task)

    def refuses(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """Return whether the step is skipped; if so, restore the buffers."""
        refused = any(each(updater, rows) for each in self.refusals)
        if refused:
            self._buffers.put_back()
        return refused


def names_of_nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have a NaN or an infinity; waits for the device."""

    def finite(each: Sequence[Tensor]) -> bool:
        return all(bool(flags.all()) for flags in all_finite(each))

    return [] if finite([*tensors.values()]) else [name for name in tensors if not finite([tensors[name]])]


def all_finite(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield, for the tensors of each device and dtype, a vector that says which of them are finite.

    It does not wait for the device. Only this rank's shard of a sharded tensor is checked. GPUs
    compute the largest magnitude: it does not overflow, as a sum of squares does, and torch's version keeps a
    NaN. Other devices (XLA) may lose a NaN there.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local = local._values() if local.layout is torch.sparse_coo else local
        if local.is_complex():  # the magnitude of a finite one may overflow
            local = torch.view_as_real(local.detach().resolve_conj())
        if local.numel() and local.is_floating_point() and local.itemsize > 1:
            groups.setdefault((local.device, local.dtype), []).append(local.detach())
    for (device, _), group in groups.items():
        if device.type == "cpu":
            yield _finite_on_cpu(group)
        elif device.type == "cuda":
            yield torch.isfinite(torch.stack(torch._foreach_norm(group, torch.inf)))
        else:
            yield torch.stack([torch.isfinite(each).all() for each in group])


def _finite_on_cpu(group: Sequence[Tensor]) -> Tensor:
    """Return which tensors are finite.

    On a CPU torch adds some forty times as fast as it compares. A finite sum has finite summands only; a sum
    that is not finite may have overflowed.
    """
    finite = torch.isfinite(torch.stack([each.sum() for each in group]))
    if finite.all():
        return finite
    return torch.stack([torch.isfinite(each).all() for each in group])
