"""Options that save memory: `MemoryConfig`, and its effects in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.validation import by_name, count, flag
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.transforms.compile import CompileConfig, as_compile
from drivetrain.strategies.transforms.offload import Offload, within
from drivetrain.strategies.transforms.recompute import Recomputation, RecomputeOption, as_recompute_option
from drivetrain.task.task import StepModule


@by_name
@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options that save memory at the cost of time; the numbers of a run do not change.

    Attributes:
        activation_checkpointing: False, or which activations to recompute in backward. True or "full"
            recomputes those of each repeated block. "selective" keeps the results of matrix products,
            convolutions and attention and recomputes the rest. A function of (context, operation, *arguments,
            **keywords) returns a `torch.utils.checkpoint.CheckpointPolicy`. Classes, their names, or globs on
            the names of modules select the modules to recompute.
        offload_activations: Keep a step's tensors for backward in the host's memory until then; on GPUs. With
            `activation_checkpointing`, these are mostly the inputs of the blocks.
        offload_at_least: The least bytes of a tensor to offload.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    activation_checkpointing: RecomputeOption = False
    offload_activations: bool = False
    offload_at_least: int = 2**20

    def __post_init__(self) -> None:
        again = as_recompute_option("MemoryConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)
        flag("MemoryConfig(offload_activations=...)", self.offload_activations)
        count("MemoryConfig(offload_at_least=...)", self.offload_at_least)


NOTHING = MemoryConfig()


def as_memory(spec: Mapping[str, Any] | MemoryConfig | None) -> MemoryConfig:
    if spec is None or isinstance(spec, MemoryConfig):
        return spec or NOTHING
    if not isinstance(spec, Mapping):
        raise ConfigError(f"memory is a MemoryConfig, a mapping of its options, or None, not {spec!r}")
    return MemoryConfig(**spec)


def check_memory(
    config: MemoryConfig,
    strategy: Strategy,
    compile: bool | Mapping[str, Any] | CompileConfig,
) -> None:
    """Check that the strategy and compilation allow the options."""
    again, offload = config.activation_checkpointing, config.offload_activations
    if again or offload:
        name = "activation_checkpointing" if again else "offload_activations"
        check_supported(strategy, "recomputation", f"MemoryConfig({name}=...)", "Use another, such as 'ddp'")
    if offload and strategy.sharded:
        raise StrategyError(
            f"offload_activations with strategy {strategy.name!r}: gathered parameters would be offloaded"
            " too. Use activation_checkpointing, or FSDPConfig(cpu_offload=True)"
        )
    if offload and strategy.device.type != "cuda":
        raise StrategyError(
            f"offload_activations with strategy {strategy.name!r} on a {strategy.device.type!r} device, which"
            " has no memory apart from the host's. Use activation_checkpointing"
        )
    if offload and as_compile(compile):
        raise ConfigError(
            "offload_activations and compile exclude one another: what is compiled chooses what it saves"
        )


class MemoryInUse:
    """The memory options in use in one run."""

    def __init__(
        self,
        spec: Mapping[str, Any] | MemoryConfig | None,
        strategy: Strategy,
        compile: bool | Mapping[str, Any] | CompileConfig,
    ) -> None:
        self._config = as_memory(spec)
        check_memory(self._config, strategy, compile)
        self._pinned = strategy.device.type == "cuda"
        self._in_use: list[Recomputation] = []

    def add(self, model: nn.Module) -> None:
        """Make a model's blocks recompute; before it is sharded or wrapped, and after it is compiled."""
        if self._config.activation_checkpointing:
            self._in_use.append(Recomputation(model, self._config.activation_checkpointing))

    def attach(self, model: nn.Module) -> None:
        """Apply the options to a model on its device."""
        if self._config.offload_activations:
            step_module = next(each for each in model.modules() if isinstance(each, StepModule))
            offload = Offload(step_module.task, self._config.offload_at_least, self._pinned)
            step_module.context = within(offload, step_module.context)

    def release(self) -> None:
        in_use, self._in_use = self._in_use, []
        for each in in_use:
            each.remove()
