"""Tensors for a weight file, each gathered and converted only when it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.format.tensors import check_tensor
from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.checkpoint.weights.dtypes import cast
from drivetrain.core.errors import ConfigError


class TensorSource(ABC):
    """Tensors by name, of which a weight file needs only one at a time.

    Attributes:
        specs: Tensors with the final dtypes and shapes that take no memory.
    """

    specs: dict[str, Tensor]

    @abstractmethod
    def materialize(self, name: str) -> Tensor:
        """Return a tensor for writing. If it is sharded, all processes that hold a part must call this.

        Raises:
            CheckpointError: A number is too large for the dtype.
        """

    def gather_rest(self, order: Iterable[str]) -> None:
        """Join the gathers of all sharded tensors that this process has not materialized. Default: none are.

        Args:
            order: All names. The other processes materialize the tensors in this order.
        """


def spec_of(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape and a dtype that takes no memory."""
    return torch.empty((), dtype=dtype).expand(tuple(shape))


class LazyTensors(TensorSource):
    """Tensors that are gathered and converted one at a time.

    Args:
        tensors: The tensors by name; any device and strides. A `DTensor` is gathered from its processes.
        dtype: The dtype for floating-point tensors; None keeps each.
        what: The tensors' name for messages.

    Raises:
        CheckpointError: A tensor cannot be stored.
        ConfigError: `tensors` is not a mapping of names to tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, what: str) -> None:
        if not isinstance(tensors, Mapping):
            hint = "its state_dict()" if isinstance(tensors, nn.Module) else "a mapping of names to tensors"
            raise ConfigError(f"{what} are a {type(tensors).__name__}; give {hint}")
        self.specs: dict[str, Tensor] = {}
        self._tensors = tensors
        self._what = what
        self._gathered: set[str] = set()
        for name, tensor in tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{what} must be tensors by name, as in a state dict; {name!r} is a "
                    f"{type(tensor).__name__}"
                )
            check_tensor(tensor, f"{what}, {name!r}")
            final = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            self.specs[name] = spec_of(tensor.shape, final)

    def materialize(self, name: str) -> Tensor:
        """Return a tensor on its device, whole and in its final dtype."""
        tensor = self._tensors[name].detach()
        if is_sharded(tensor):
            self._gathered.add(name)
            sharded: Any = tensor
            tensor = sharded.full_tensor()
        if tensor.is_floating_point():
            tensor = cast(tensor, self.specs[name].dtype, f"{self._what}, {name!r}")
        return tensor

    def gather_rest(self, order: Iterable[str]) -> None:
        for name in order:
            if is_sharded(self._tensors[name]) and name not in self._gathered:
                sharded: Any = self._tensors[name].detach()
                sharded.full_tensor()
