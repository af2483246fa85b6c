"""Tensors on their way into a file of weights: each made whole, and given its dtype, when it is its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.dtypes import cast
from drivetrain.checkpoint.sharding import is_sharded
from drivetrain.checkpoint.tensors import check_tensor
from drivetrain.errors import ConfigError


class Outgoing:
    """Tensors of which one at a time is in memory as it will be written.

    Args:
        tensors: By name; any device and strides. A `DTensor` is gathered from the processes that hold it.
        dtype: What floating-point tensors are converted to; None for what each has.
        what: What to call them in a message.

    Attributes:
        planned: What will be written, without the content: tensors that have the dtype and the shape, and
            take no memory.

    Raises:
        CheckpointError: A tensor that cannot be stored.
        ConfigError: No mapping of names to tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None, what: str) -> None:
        if not isinstance(tensors, Mapping):
            hint = "its state_dict()" if isinstance(tensors, nn.Module) else "a mapping of names to tensors"
            raise ConfigError(f"{what} are given as a {type(tensors).__name__}; give {hint}")
        self.planned: dict[str, Tensor] = {}
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
            self.planned[name] = torch.empty((), dtype=final).expand(tensor.shape)

    def take(self, name: str) -> Tensor:
        """A tensor as it is to be written; where it is sharded, by all processes that hold a part of it.

        Raises:
            CheckpointError: A number is too large for the dtype.
        """
        tensor = self._tensors[name].detach()
        if is_sharded(tensor):
            self._gathered.add(name)
            sharded: Any = tensor
            tensor = sharded.full_tensor()
        if tensor.is_floating_point():
            tensor = cast(tensor, self.planned[name].dtype, f"{self._what}, {name!r}")
        return tensor

    def gather_rest(self, order: Iterable[str]) -> None:
        """Take part in gathering what has not been taken, for the sake of the processes that take it.

        Args:
            order: All names, in the order in which they are taken.
        """
        for name in order:
            if is_sharded(self._tensors[name]) and name not in self._gathered:
                sharded: Any = self._tensors[name].detach()
                sharded.full_tensor()
