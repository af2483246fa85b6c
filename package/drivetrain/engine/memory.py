"""Options that save memory: `MemoryConfig`, and its effects in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.transforms.recompute import RecomputeOption, as_recompute_option


@by_name
@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options that save memory at the cost of time; the numbers of a run do not change.

    Attributes:
        activation_checkpointing: False, or which activations to recompute in backward. True or "full"
            recomputes the activations of each repeated block. "selective" keeps the results of matrix
            products, convolutions and attention and recomputes the rest. A function of (context, operation,
            *arguments, **keywords) returns a `torch.utils.checkpoint.CheckpointPolicy`. Classes, their names,
            or globs on the names of modules select the modules to recompute.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    activation_checkpointing: RecomputeOption = False

    def __post_init__(self) -> None:
        again = as_recompute_option("MemoryConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)


WHAT_HELPS = (
    "what helps: Trainer(micro_batch='auto'), which splits each batch until it fits, or a smaller batch with"
    " more gradient_accumulation_steps. In an evaluation give Trainer(evaluation_batch_size=...). Less memory"
    " is used by activation checkpointing (Trainer(memory={'activation_checkpointing': True})), a smaller"
    " optimizer state (OptimizerConfig('adamw8bit')), a lower precision, shards ('fsdp', 'zero3') and"
    " offloading (FSDPConfig(cpu_offload=True), 'zero3_offload'). If much memory is reserved but unallocated,"
    " set PYTORCH_ALLOC_CONF=expandable_segments:True"
)
"""Advice for a run that is out of memory."""


def check_memory(spec: Mapping[str, Any] | MemoryConfig | None, strategy: Strategy) -> MemoryConfig:
    """Return a user's `memory` option as a configuration, checked against the strategy."""
    if not isinstance(spec, (Mapping, MemoryConfig, type(None))):
        raise ConfigError(f"memory is a MemoryConfig, a mapping of its options, or None, not {spec!r}")
    config = spec if isinstance(spec, MemoryConfig) else MemoryConfig(**(spec or {}))
    if config.activation_checkpointing:
        asked = "MemoryConfig(activation_checkpointing=...)"
        check_supported(strategy, "recomputation", asked, "Use another, such as 'ddp'")
    return config
