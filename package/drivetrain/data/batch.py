"""What a batch may be: counting its samples, and mapping a function over its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from drivetrain.containers import opened
from drivetrain.types import Batch


def batch_size(batch: Batch) -> int | None:
    """The length of the first dimension of a batch's first tensor, which is its number of samples.

    An object of another kind is counted by its `num_graphs` (torch_geometric's batches) or, when it can be
    moved by `to(device)`, by its length. None when there is nothing to count: such a batch is of an unknown
    kind.
    """
    kind = type(batch)
    if kind is Tensor:
        return int(batch.shape[0]) if batch.ndim else None
    if kind is dict:
        for value in batch.values():  # the usual batch, answered without a second call
            if type(value) is Tensor and (shape := value.shape):
                return int(shape[0])
        values: Any = batch.values()
    elif kind is tuple or kind is list:
        if batch and type(batch[0]) is Tensor and (shape := batch[0].shape):  # likewise
            return int(shape[0])
        values = batch
    elif isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.ndim else None
    elif isinstance(batch, PackedSequence):  # its first tensor holds time steps, its second counts samples
        return int(batch.batch_sizes[0])
    elif (container := opened(batch)) is not None:
        values = container.entries
    else:
        length = getattr(batch, "num_graphs", None)  # graph batches (torch_geometric) count graphs
        if length is None and _moves_itself(batch) and hasattr(batch, "__len__"):
            length = len(batch)
        return length if isinstance(length, int) else None
    for value in values:
        size = batch_size(value)
        if size is not None:
            return size
    return None


def map_tensors(
    function: Callable[[Tensor], Any], batch: Batch, other: Callable[[Any], Any] | None = None
) -> Batch:
    """The same structure with `function` applied to every tensor.

    Args:
        function: What to do with a tensor.
        batch: Tensors in containers, nested as deep as one likes; each container keeps its type, see
            `containers.opened`.
        other: What to do with an object that has a `to` method of its own; None leaves it as it is, as it
            leaves everything else that is no tensor.
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


def host_tensors_only(batch: Batch) -> bool:
    """Whether all that `move` would bring to an accelerator are tensors on the host, which it copies itself.

    Not so where a tensor is on a device already, or an object is moved by its own `to`, which allocates what
    nobody sees.
    """
    if isinstance(batch, Tensor):
        return batch.device.type == "cpu"
    if type(batch) is not tuple and type(batch) is not list and _moves_itself(batch):
        return False
    container = opened(batch)
    return container is None or all(map(host_tensors_only, container.entries))


def _moves_itself(batch: Any) -> bool:
    return callable(getattr(batch, "to", None)) and not isinstance(batch, (Tensor, type))


def move(
    batch: Batch, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
) -> Batch:
    """A batch on a device, its floating-point tensors in `dtype` when one is given.

    Objects with a `to` method of their own, a packed sequence or a tokeniser's output, are moved by it,
    wherever in the batch they stand; what can be seen inside of them is cast.
    """

    def move_tensor(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else None
        return tensor.to(device, wanted, non_blocking=non_blocking)

    def cast(tensor: Tensor) -> Tensor:  # and leave it where its owner put it
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def move_other(value: Any) -> Any:
        moved = value.to(device)
        return moved if dtype is None else map_tensors(cast, moved)

    return map_tensors(move_tensor, batch, move_other)


def to_host(outputs: Any) -> Any:
    """Outputs detached and on the CPU; bfloat16 and others keep their dtype."""
    if type(outputs) is Tensor:  # the usual prediction, without a walk
        return (outputs.detach() if outputs.requires_grad else outputs).cpu()
    return map_tensors(lambda tensor: tensor.detach().cpu(), outputs, lambda value: value.to("cpu"))
