"""Options that save memory: `MemoryConfig`, and its effects in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.core.validation import by_name
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.transforms.recompute import Recomputation, RecomputeOption, as_recompute_option


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


NOTHING = MemoryConfig()

WHAT_HELPS = (
    "what helps: Trainer(micro_batch='auto'), which splits each batch until it fits, or a smaller batch with"
    " more gradient_accumulation_steps; Trainer(evaluation_batch_size=...) in an evaluation; activation"
    " checkpointing (Trainer(memory={'activation_checkpointing': True})); an optimizer with a smaller state"
    " (OptimizerConfig('adamw8bit')); a lower precision; shards ('fsdp', 'zero3') or offloading"
    " (FSDPConfig(cpu_offload=True), 'zero3_offload'); where much is reserved but unallocated, the variable"
    " PYTORCH_ALLOC_CONF=expandable_segments:True"
)
"""Advice for a run that is out of memory."""


def as_memory(spec: Mapping[str, Any] | MemoryConfig | None) -> MemoryConfig:
    if spec is None or isinstance(spec, MemoryConfig):
        return spec or NOTHING
    if not isinstance(spec, Mapping):
        raise ConfigError(f"memory is a MemoryConfig, a mapping of its options, or None, not {spec!r}")
    return MemoryConfig(**spec)


def check_memory(config: MemoryConfig, strategy: Strategy) -> None:
    """Check that the strategy allows the options."""
    if config.activation_checkpointing:
        asked = "MemoryConfig(activation_checkpointing=...)"
        check_supported(strategy, "recomputation", asked, "Use another, such as 'ddp'")


class MemoryInUse:
    """The memory options in use in one run."""

    def __init__(self, spec: Mapping[str, Any] | MemoryConfig | None, strategy: Strategy) -> None:
        self._config = as_memory(spec)
        check_memory(self._config, strategy)
        self._in_use: list[Recomputation] = []

    def add(self, model: nn.Module) -> None:
        """Make a model's blocks recompute; before it is sharded or wrapped, and after it is compiled."""
        if self._config.activation_checkpointing:
            self._in_use.append(Recomputation(model, self._config.activation_checkpointing))

    def release(self) -> None:
        in_use, self._in_use = self._in_use, []
        for each in in_use:
            each.remove()
