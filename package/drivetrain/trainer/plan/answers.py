"""Tensors without values, and answers for them and for ranks without processes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.strategies.fsdp.experts import even_counts
from drivetrain.task.optim.quantized import is_quantized

_CONTAINERS = (dict, list, set)

_BETWEEN = ("torch.", "drivetrain.trainer.plan.", "drivetrain.engine.memory_profile")
"""The modules whose frames are between a read and its answer."""

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
        if func is torch.ops.aten._local_scalar_dense.default and (self.number is not None or _is_ours()):
            return 1.0 if self.number is None else self.number
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


def _is_ours() -> bool:
    """Return whether the engine reads a value, such as a term's weight, and not the task."""
    frame: Any = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(_BETWEEN):
        frame = frame.f_back
    return str(frame.f_globals["__name__"]).startswith(("drivetrain.engine", "drivetrain.strategies"))


def fake(value: Any) -> Any:
    """Return a tensor like another, without values in a fake mode; any other value as it is."""
    if is_quantized(value):
        names, context = value.__tensor_flatten__()
        parts = {name: fake(getattr(value, name)) for name in names}
        return value.__tensor_unflatten__(parts, context, value.shape, value.stride())
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)


def without_values(task: nn.Module) -> Any:
    """Return a copy of the task whose parameters and buffers have no values.

    Lists, mappings and sets among the attributes of modules are copied; all other attributes are shared.
    """
    made: dict[int, Any] = {}

    def tensor(old: Tensor | None) -> Any:
        if old is None or id(old) in made:
            return made.get(id(old))
        new = fake(old)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
            new.__dict__.update({**vars(old), **vars(new)})
        made[id(old)] = new
        return new

    def module(old: nn.Module | None) -> Any:
        if old is None or id(old) in made:
            return made.get(id(old))
        new = made[id(old)] = object.__new__(type(old))
        # A step may store tensors in a list or a mapping of the task, and these have no values.
        own = {name: copy.copy(each) for name, each in vars(old).items() if isinstance(each, _CONTAINERS)}
        new.__dict__.update({**vars(old), **own})
        for kind, remade in (("_parameters", tensor), ("_buffers", tensor), ("_modules", module)):
            new.__dict__[kind] = {name: remade(each) for name, each in old.__dict__[kind].items()}
        return new

    return module(task)
