"""Answers for tensors without values, and for ranks without processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.strategies.fsdp.experts import even_counts

CPU = torch.device("cpu")
"""The device of tensors without values. Fake ones of a GPU start CUDA, and no fork could use it then."""


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what tensors without values and ranks without processes cannot.

    Attributes:
        number: What is read from a tensor now; None if that is refused.
    """

    def __init__(self, number: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # asked two times for each operation
            return CPU
        if func is torch.ops.c10d.allreduce_.default:
            # DDP reads the averages from the future, which is empty under the fake group.
            from torch._C._distributed_c10d import Work, _create_work_from_future  # type: ignore[attr-defined]

            future: Any = Future()
            future.set_result(args[0])
            return args[0], Work.boxed(_create_work_from_future(future))
        if func is torch.ops.aten._local_scalar_dense.default and self.number is not None:
            return self.number
        if func is torch.ops.aten.bincount.default and len(args) == 3 and args[1] is None:
            return even_counts(len(args[0]), args[2])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def answering(self, number: float) -> Iterator[None]:
        """Answer a number to what the block reads."""
        before, self.number = self.number, number
        try:
            yield
        finally:
            self.number = before
