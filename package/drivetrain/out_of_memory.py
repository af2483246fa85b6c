"""Running out of memory: how it is told from other errors, how what it holds is let go of, what helps."""

from __future__ import annotations

import gc
import traceback

import torch

_TEXTS = (
    "can't allocate memory",  # torch's allocator of the host, on POSIX systems
    "not enough memory: you tried to allocate",  # and on Windows
    "out of memory",  # CUDA and MPS, where a library has made another error of torch's own
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What an error of lacking memory says that has no class of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _TEXTS)


def let_go(error: BaseException) -> None:
    """Free what the frames hold that an error has passed through; its traceback is gone then."""
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
    """Give back what is unreachable, and what the device's allocator keeps for later."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def advice(micro_batch: int | str | None, training: bool = True) -> str:
    """What can be done about it.

    Args:
        micro_batch: How the run splits its batches already; see `Trainer`.
        training: Whether gradients were needed; an evaluation has none to accumulate or to recompute for.
    """
    first = ""
    if micro_batch is None:
        first = "Trainer(micro_batch='auto'), which splits each batch until it fits; "
    elif isinstance(micro_batch, int):
        first = (
            f"a micro_batch smaller than {micro_batch}, or 'auto', which splits each batch until it fits; "
        )
    less = "a smaller batch"
    if training:
        less += (
            " with more gradient_accumulation_steps; activation checkpointing"
            " (Trainer(memory={'activation_checkpointing': True})); an optimizer with a smaller state"
            " (OptimizerConfig('adamw8bit'))"
        )
    return (
        f"what helps: {first}{less}; a lower precision; shards ('fsdp', 'zero3') or offloading"
        " (FSDPConfig(cpu_offload=True), 'zero3_offload')"
    )
