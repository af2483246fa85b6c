"""Waits of the host for the device, found on a machine without a GPU."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import drivetrain
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer

Note = Callable[[str, str], None]
"""Takes an operation and why it waits."""

_WARM = 2
"""Steps before those that are watched: the first ones allocate and compile."""

_SIZE = "the size of the result is read"
_READS = {
    "_local_scalar_dense": "a number is read, as by item(), float() or `if tensor`",
    **dict.fromkeys(("equal", "allclose"), "the outcome is a bool of the host"),
    "_linalg_check_errors": "the outcome is read; the `_ex` functions do not check it",
    "lift_fresh": "Python numbers become a tensor; torch.full copies nothing",
    **dict.fromkeys(("nonzero", "masked_select", "bincount", "_coalesce"), _SIZE),
    **dict.fromkeys(("_unique2", "unique_dim", "unique_consecutive"), _SIZE),
}
"""Operations that wait on a GPU, by torch's names."""

_COPIES = {Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__}
"""Methods that copy to the host, also for `print`. On a CPU they are no operations of a dispatch mode."""

_CUDA_WAIT = "called a synchronizing CUDA operation"

_PACKAGE = f"{Path(drivetrain.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_ON_THE_HOST = (
    f"{_PACKAGE}data/feed.py",  # counts batches before they are moved
    f"{_PACKAGE}distributed/ranks.py",  # exchanges numbers of the host
    f"{_PACKAGE}callbacks/mixture_monitor.py:_numbers",  # reads batches before they are moved
    f"{_PACKAGE}core/devices.py",  # copies from pinned memory, which nothing waits for
    f"{_PACKAGE}engine/skip.py:_finite_on_cpu",  # runs on CPUs alone
    f"{_TORCH}optim/optimizer.py:_get_value",  # torch's optimizers that are not fused count on the host
    f"{_TORCH}utils/data/",  # makes batches
)
"""Code whose reads are no waits on any machine: files, functions, and a folder."""


class HostReads:
    """A context manager that notes each operation, but a `copy_`, for which the host would wait for a GPU."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.reads: list[str] = []
        self._on_cuda = torch.device(device).type == "cuda"
        self._open = ExitStack()

    def __enter__(self) -> Self:
        copies = _CopyWatch(self._note)
        modes: tuple[AbstractContextManager[Any], ...] = (copies, _Operations(self._note, copies))
        for each in (_cuda_waits(self._note),) if self._on_cuda else modes:
            self._open.enter_context(each)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _note(self, operation: str, reason: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        place = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not self._on_cuda and f"{file}:{frame.f_code.co_name}".startswith(_ON_THE_HOST):
                return
            if not place and file not in (__file__, warnings.__file__) and not file.startswith(_TORCH):
                place = f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        self.reads.append(f"{operation} at {place}: {reason}")


def no_host_reads(
    task: TaskModule, data: Any, *, steps: int = 4, allowed: float = 0, **options: Any
) -> list[str]:
    """Check that a steady step of a fit makes the host wait for nothing that a GPU computes."""
    quiet: dict[str, Any] = {"checkpoint": False, "loggers": (), "progress_bar": False, "strategy": "cpu"}
    seldom = {"log_every": "1_000_000_000 steps", "validate_every": None}
    limit = {} if options.keys() & {"max_epochs", "max_time"} else {"max_steps": _WARM + steps + 1}
    trainer = Trainer(**{**quiet, **seldom, **limit, **options})
    with closing(trainer.steps(task, data)) as results:
        made = sum(1 for _ in islice(results, _WARM))
        with HostReads(trainer.select_strategy().device) as found:
            made += sum(1 for _ in islice(results, steps))
    if made < _WARM + steps:
        raise AssertionError(f"the fit ended after {made} steps and needs {_WARM + steps}: give more data")
    if len(found.reads) > allowed * steps:
        counted = Counter(found.reads).most_common()
        rows = "".join(f"\n  {times} x {each}" for each, times in counted)
        raise AssertionError(
            f"the host waits for the device {len(found.reads)} times in {steps} steps, and"
            f" {allowed:g} are allowed in each:{rows}"
        )
    return found.reads


class _CopyWatch(TorchFunctionMode):
    """Shows methods that copy to the host."""

    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note
        self.fills = False

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        given = keywords.get("device", arguments[1] if len(arguments) > 1 else None)
        to_host = function is Tensor.to and isinstance(given, str) and given == "cpu"
        shown = function is Tensor.__format__ and arguments[0].ndim > 0  # otherwise it reads a number
        if function in _COPIES or to_host or shown:
            self._note(function.__name__, "a tensor is copied to the host")
        self.fills = function is Tensor.__setitem__ and not isinstance(arguments[2], Tensor)
        try:
            return function(*arguments, **keywords)
        finally:
            self.fills = False


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows operations that would wait."""

    def __init__(self, note: Note, copies: _CopyWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._copies = copies

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name, keywords = function.overloadpacket.__name__, keywords or {}
        if name == "lift_fresh" and self._copies.fills and arguments[0].ndim == 0:
            pass  # a number that is assigned to elements is an argument of a kernel
        elif name in _READS:
            self._note(name, _READS[name])
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            # A single number for the chosen elements is masked_fill, which waits for nothing.
            single = name != "index" and arguments[2].numel() == 1
            chosen = [each.dtype for each in arguments[1] if each is not None]
            if not single and (torch.bool in chosen or torch.uint8 in chosen):
                self._note(name, "a mask chooses elements, and their number is read; use torch.where")
        elif name == "repeat_interleave" and keywords.get("output_size") is None:
            self._note(name, f"{_SIZE}; give output_size")
        return function(*arguments, **keywords)


@contextmanager
def _cuda_waits(note: Note) -> Iterator[None]:
    """Show torch's warnings of waits; those of other threads that backward uses come when it ends."""
    before, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

    def noted(message: Any, *others: Any, **more: Any) -> None:
        if _CUDA_WAIT in str(message):
            note("cudaStreamSynchronize", "torch says so")
        else:
            show(message, *others, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        warnings.filterwarnings("always", f".*{_CUDA_WAIT}")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
