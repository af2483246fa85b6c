"""Options that save memory: `MemoryConfig`, and its effects in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.progress import Progress
from drivetrain.core.validation import by_name, check_names, count, flag
from drivetrain.engine.gradient_release import GradientRelease
from drivetrain.engine.updater import Updater
from drivetrain.strategies import Prepared, Strategy
from drivetrain.strategies.precision.base import Precision
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
        release_gradients: Update each parameter within backward as soon as its gradient exists, and free the
            gradient. For one process, one optimizer of torch or torchao, and updates of one micro-batch
            without clipping.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    activation_checkpointing: RecomputeOption = False
    offload_activations: bool = False
    offload_at_least: int = 2**20
    release_gradients: bool = False

    def __post_init__(self) -> None:
        """Check each option."""
        again = as_recompute_option("MemoryConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)
        flag("MemoryConfig(offload_activations=...)", self.offload_activations)
        count("MemoryConfig(offload_at_least=...)", self.offload_at_least)
        flag("MemoryConfig(release_gradients=...)", self.release_gradients)


NOTHING = MemoryConfig()


def as_memory(spec: Mapping[str, Any] | MemoryConfig | None) -> MemoryConfig:
    """Return the user's argument as a configuration.

    Raises:
        ConfigError: It has another type; says what is allowed.
    """
    if spec is None or isinstance(spec, MemoryConfig):
        return spec or NOTHING
    if not isinstance(spec, Mapping):
        raise ConfigError(f"memory is a MemoryConfig, a mapping of its options, or None, not {spec!r}")
    check_names("memory", spec, [each.name for each in fields(MemoryConfig)])
    return MemoryConfig(**spec)


def check_memory(
    config: MemoryConfig,
    strategy: Strategy,
    precision: Precision,
    compile: bool | Mapping[str, Any] | CompileConfig,
) -> None:
    """Check that the strategy, the precision and compilation allow the options.

    Raises:
        ConfigError: The precision does not, or compilation does not.
        StrategyError: The strategy does not; says why.
    """
    again, offload = config.activation_checkpointing, config.offload_activations
    if (again or offload) and strategy.no_recomputation:
        name = "activation_checkpointing" if again else "offload_activations"
        raise StrategyError(
            f"MemoryConfig({name}=...) with strategy {strategy.name!r}: {strategy.no_recomputation}"
        )
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
    if not config.release_gradients:
        return
    if strategy.no_release:
        raise StrategyError(f"release_gradients with strategy {strategy.name!r}: {strategy.no_release}")
    if precision.loss_scaling:
        raise ConfigError(
            f"release_gradients with precision {precision.name!r}: a scaled loss's gradients are all looked"
            " at before any update. Use 'bf16-mixed', or release_gradients=False"
        )


class MemoryInUse:
    """The memory options in use in one run.

    Args:
        spec: The configuration.
        strategy: The run's strategy.
        precision: The run's precision.
        compile: The compiled parts.

    Attributes:
        releases: Whether gradients are freed within backward.
    """

    def __init__(
        self,
        spec: Mapping[str, Any] | MemoryConfig | None,
        strategy: Strategy,
        precision: Precision,
        compile: bool | Mapping[str, Any] | CompileConfig,
    ) -> None:
        self._config = as_memory(spec)
        self.releases = self._config.release_gradients
        check_memory(self._config, strategy, precision, compile)
        self._pinned = strategy.device.type == "cuda"
        self._in_use: list[Recomputation | GradientRelease] = []

    def add(self, model: nn.Module) -> None:
        """Make a model's blocks recompute; before it is sharded or wrapped, and after it is compiled.

        Raises:
            ConfigError: It has no such blocks.
        """
        if self._config.activation_checkpointing:
            self._in_use.append(Recomputation(model, self._config.activation_checkpointing))

    def attach(self, prepared: Prepared) -> None:
        """Apply the options to the model of the user's own loop.

        Raises:
            ConfigError: Gradients should be released, but only the loop knows the window.
        """
        if self._config.release_gradients:
            raise ConfigError(
                "release_gradients is for Trainer.fit: in a loop of your own a second backward before the"
                " step would be an update of its own"
            )
        step_module = next(each for each in prepared.model.modules() if isinstance(each, StepModule))
        self._offload(step_module)

    def attach_task(
        self, step_module: StepModule, updaters: Mapping[str, Updater], interleaved: bool, progress: Progress
    ) -> None:
        """Apply the options to a task on its device, with its optimizers.

        Args:
            step_module: The task's step module.
            updaters: The task's optimizers.
            interleaved: Whether the task's step is a generator that names its optimizers.
            progress: The run's progress; identifies the update.

        Raises:
            ConfigError: Gradients cannot be released with these optimizers.
        """
        self._offload(step_module)
        if not self._config.release_gradients:
            return
        if interleaved or len(updaters) != 1:
            raise ConfigError(
                "release_gradients with several optimizers: a backward of one may add to what another trains."
                " Configure one optimizer, or release_gradients=False"
            )
        (updater,) = updaters.values()
        if updater.max_grad_norm is not None:
            raise ConfigError(
                f"release_gradients with OptimizerConfig(max_grad_norm={updater.max_grad_norm}): clipping"
                " needs all gradients at once. Leave one of them out"
            )
        names = {each: clean_name(name) for name, each in step_module.task.named_parameters()}
        self._in_use.append(GradientRelease(updater.optimizer, lambda: progress.micro_batches, names))

    def _offload(self, step_module: StepModule) -> None:
        if self._config.offload_activations:
            offload = Offload(step_module.task, self._config.offload_at_least, self._pinned)
            step_module.context = within(offload, step_module.context)

    def release(self) -> None:
        """Undo all effects."""
        in_use, self._in_use = self._in_use, []
        for each in in_use:
            each.remove()
