"""Running out of memory: recognise the error, and free what it holds."""

from __future__ import annotations

import gc
import traceback

import torch

_TEXTS = (
    "can't allocate memory",  # torch's allocator of the host, on POSIX systems
    "not enough memory: you tried to allocate",  # and on Windows
    "out of memory",  # CUDA and MPS, when a library has turned torch's error into another
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Messages of out-of-memory errors that are plain RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _TEXTS)


def clear_frames(error: BaseException) -> None:
    """Free the local variables in the frames of an error and of its causes; drops their tracebacks."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__cause__, each.__context__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def free_caches() -> None:
    """Free unreachable objects and the device allocator's cache."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    elif torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        torch.xpu.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
