"""Advice for a run that is out of memory."""

from __future__ import annotations

import os

import torch


def memory_advice(micro_batch: int | str | None, training: bool = True) -> str:
    """Return what to try after running out of memory, without what the run does already.

    Args:
        micro_batch: How the run splits its batches in training; see `Trainer`.
        training: Whether gradients were needed. Splitting, accumulation and recomputation do not help an
            evaluation.
    """
    first = ""
    if not training:
        pass
    elif micro_batch is None:
        first = "Trainer(micro_batch='auto'), which splits each batch until it fits; "
    elif isinstance(micro_batch, int):
        first = (
            f"a micro_batch smaller than {micro_batch}, or 'auto', which splits each batch until it fits; "
        )
    less = "smaller batches, such as Trainer(evaluation_batch_size=...) for a dataset"
    if training:
        less = (
            "a smaller batch with more gradient_accumulation_steps; activation checkpointing"
            " (Trainer(memory={'activation_checkpointing': True})); an optimizer with a smaller state"
            " (OptimizerConfig('adamw8bit'))"
        )
    return (
        f"what helps: {first}{less}; a lower precision; shards ('fsdp', 'zero3') or offloading"
        f" (FSDPConfig(cpu_offload=True), 'zero3_offload'){_against_fragments()}"
    )


def _against_fragments() -> str:
    """Return the advice for memory that is reserved but in pieces, as after batches of many sizes."""
    set_already = any("expandable_segments" in os.environ.get(name, "") for name in _ALLOCATOR)
    if not torch.cuda.is_initialized() or set_already:  # type: ignore[no-untyped-call]
        return ""
    return (
        "; where much is reserved but unallocated, the environment variable"
        " PYTORCH_ALLOC_CONF=expandable_segments:True"
    )


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
