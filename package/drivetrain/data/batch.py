"""Count a batch's samples, map a function over its tensors, and move it between devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from drivetrain.core.containers import opened
from drivetrain.core.types import Batch


def batch_size(batch: Batch) -> int | None:
    """Return a batch's number of samples: the length of its first tensor's first dimension.

    An object of another kind is counted by its `num_graphs` (torch_geometric's batches) or, if it has a `to`
    method, by its length. None if there is nothing to count: the kind of batch is unknown.
    """
    kind = type(batch)
    if kind is Tensor or isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else None
    if kind in (dict, tuple, list):
        values: Any = batch.values() if kind is dict else batch
        for value in values if kind is dict else batch[:1]:  # the usual batch, without a recursive call
            if type(value) is Tensor and (shape := value.shape):
                return int(shape[0])
    elif isinstance(batch, PackedSequence):  # its first tensor holds time steps, its second counts samples
        return int(batch.batch_sizes[0])
    elif (container := opened(batch)) is not None:
        values = container.entries
    else:
        return _own_count(batch)
    for value in values:
        size = batch_size(value)
        if size is not None:
            return size
    return None


def _own_count(batch: Any) -> int | None:
    length = getattr(batch, "num_graphs", None)  # torch_geometric's batches count graphs
    if length is None and _moves_itself(batch) and hasattr(batch, "__len__"):
        length = len(batch)
    return length if isinstance(length, int) else None


def first_dimensions(batch: Batch) -> dict[str, int]:
    """Return the lengths of the first dimensions of a batch's tensors, by key or index, unless all are equal.

    Tensors deeper inside count their own things, such as the boxes of each image. A tensor after the first
    whose dimension is 1 is broadcast to all samples, as positions of a sequence are.
    """
    container = None if isinstance(batch, (Tensor, PackedSequence)) else opened(batch)
    if container is None:
        return {}
    found = {
        str(name): int(each.shape[0])
        for name, each in zip(container.names, container.entries, strict=True)
        if isinstance(each, Tensor) and each.ndim
    }
    sizes = list(found.values())
    return found if set(sizes[1:]) - {1, *sizes[:1]} else {}


_SHOWN = 8
"""The entries of each container that a description of a batch has."""


def described(batch: Batch) -> str:
    """Return the types and shapes in a batch as text: "(float32[32, 8], int64[32])"."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if (container := opened(batch)) is None:
        return type(batch).__name__
    if container.entries and all(isinstance(each, (int, float)) for each in container.entries):
        return f"a {type(batch).__name__} of {len(container.entries)} numbers"
    shown = [described(each) for each in container.entries[:_SHOWN]]
    is_named = not isinstance(container.names, range)
    shown = [f"{n!r}: {each}" if is_named else each for n, each in zip(container.names, shown, strict=False)]
    text = ", ".join([*shown, *(["..."] if len(container.entries) > _SHOWN else [])])
    return f"{{{text}}}" if is_named else f"({text})"


def map_tensors(
    function: Callable[[Tensor], Any], batch: Batch, other: Callable[[Any], Any] | None = None
) -> Batch:
    """Return the same structure with `function` applied to every tensor.

    Args:
        function: Called with each tensor.
        batch: Tensors in containers, nested to any depth; each container keeps its type, see
            `containers.opened`.
        other: Called with each other object that has a `to` method; None leaves it unchanged. All else that
            is not a tensor stays unchanged.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if type(batch) is dict:
        return {key: map_tensors(function, value, other) for key, value in batch.items()}
    if type(batch) is list:
        return [map_tensors(function, value, other) for value in batch]
    if other is not None and type(batch) is not tuple and _moves_itself(batch):
        return other(batch)
    container = opened(batch)
    if container is None:
        return batch
    return container.rebuild([map_tensors(function, each, other) for each in container.entries])


def copied_bytes(batch: Batch) -> float | None:
    """Return how many bytes `move` would copy to an accelerator, if it would only copy tensors of the host.

    None if a tensor is already on a device, or if an object has its own `to` method, whose allocations are
    unknown. A tensor without bytes of its own, such as a sparse one, counts as infinitely many.
    """
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":
            return None
        return batch.nbytes if batch.layout is torch.strided else math.inf
    if type(batch) is dict:
        entries: Iterable[Any] = batch.values()
    else:
        if type(batch) is not tuple and type(batch) is not list and _moves_itself(batch):
            return None
        container = opened(batch)
        entries = () if container is None else container.entries
    whole = 0.0
    for entry in entries:
        if (one := copied_bytes(entry)) is None:
            return None
        whole += one
    return whole


def _moves_itself(batch: Any) -> bool:
    return callable(getattr(batch, "to", None)) and not isinstance(batch, (Tensor, type))


def move(
    batch: Batch, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> Batch:
    """Return a batch on a device, with its floating-point tensors in `dtype` if one is given.

    Objects anywhere in the batch with their own `to` method, such as a packed sequence or a tokeniser's
    output, are moved by it; the tensors found inside them are cast.
    """

    def move_tensor(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else None
        return tensor.to(device, wanted, non_blocking=non_blocking)

    def cast(tensor: Tensor) -> Tensor:  # on whichever device its owner put it
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def move_other(value: Any) -> Any:
        moved = value.to(device)
        return moved if dtype is None else map_tensors(cast, moved)

    return map_tensors(move_tensor, batch, move_other)


def to_host(outputs: Any) -> Any:
    """Return outputs detached and on the CPU; dtypes such as bfloat16 are kept."""
    if type(outputs) is Tensor:  # the usual prediction, without a recursive call
        return (outputs.detach() if outputs.requires_grad else outputs).cpu()
    return map_tensors(lambda tensor: tensor.detach().cpu(), outputs, lambda value: value.to("cpu"))
