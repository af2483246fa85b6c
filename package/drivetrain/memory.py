"""What a run trades for memory: `MemoryConfig`, and what it does in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.compiling import CompileConfig, as_compile
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.gradient_release import GradientRelease
from drivetrain.module_state import clean_name
from drivetrain.offloading import Offload, within
from drivetrain.options import by_name, check_names, count, flag
from drivetrain.precision import Precision, as_precision
from drivetrain.progress import Progress
from drivetrain.strategies import Prepared, Strategy
from drivetrain.strategies.recomputation import Again, Recomputation, as_again
from drivetrain.task import StepModule
from drivetrain.updates import Updater

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


@by_name
@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is traded for memory; no number of a run depends on it.

    Attributes:
        activation_checkpointing: False; True or "full" to compute the activations of each repeated block
            again in backward; "selective" to keep the results of matrix products, convolutions and attention
            and compute the rest again; a function of (context, operation, *arguments, **keywords) that gives
            a `torch.utils.checkpoint.CheckpointPolicy`; or classes, their names, or globs on the names of
            modules, whose activations are computed again.
        offload_activations: Keep what backward needs of a step in the host's memory until then; on GPUs. With
            `activation_checkpointing`, that is mostly the inputs of the blocks.
        offload_at_least: The bytes of a tensor that is worth it.
        release_gradients: Update each parameter within backward as soon as its gradient is there, and free
            that. For one process, one optimizer of torch or torchao, and updates of one micro-batch without
            clipping.

    Raises:
        ConfigError: A value that is not allowed; says what is.
    """

    activation_checkpointing: Again = False
    offload_activations: bool = False
    offload_at_least: int = 2**20
    release_gradients: bool = False

    def __post_init__(self) -> None:
        """Check each option."""
        again = as_again("MemoryConfig", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", again)
        flag("MemoryConfig(offload_activations=...)", self.offload_activations)
        count("MemoryConfig(offload_at_least=...)", self.offload_at_least)
        flag("MemoryConfig(release_gradients=...)", self.release_gradients)


NOTHING = MemoryConfig()


def as_memory(spec: Mapping[str, Any] | MemoryConfig | None) -> MemoryConfig:
    """What a user wrote, as a configuration.

    Raises:
        ConfigError: It is no such thing; says what is.
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
    """See that a strategy, a precision and compilation allow it.

    Raises:
        ConfigError: Not this precision, or not compiled.
        StrategyError: Not this strategy; says why.
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


def check_trainer_memory(trainer: Trainer, strategy: Strategy) -> None:
    """See that a Trainer's arguments allow what it trades for memory.

    Raises:
        ConfigError: They do not; names the one.
        StrategyError: The strategy does not.
    """
    config = as_memory(trainer.memory)
    check_memory(config, strategy, as_precision(trainer.precision), trainer.compile)
    if not config.release_gradients:
        return
    reason = ""
    if trainer.gradient_accumulation_steps > 1:
        reason = (
            f"gradient_accumulation_steps={trainer.gradient_accumulation_steps}: gradients have to be kept"
        )
    elif trainer.max_grad_norm is not None:
        reason = f"max_grad_norm={trainer.max_grad_norm}: clipping needs all gradients at once"
    elif trainer.micro_batch is not None:
        reason = f"micro_batch={trainer.micro_batch!r}: gradients of parts have to be kept"
    elif trainer.on_nonfinite == "skip":
        reason = "on_nonfinite='skip': updates are made before all gradients are there"
    for callback in trainer.callbacks:
        hook = getattr(callback, "on_before_optimizer_step", None)
        unread = getattr(hook, "__unused_hook__", False) or getattr(hook, "__no_gradients__", False)
        if hook is not None and not unread:
            reason = f"{type(callback).__name__}.on_before_optimizer_step: there is no gradient left to see"
    if reason:
        raise ConfigError(f"release_gradients with {reason}. Leave one of them out")


class MemoryInUse:
    """What one run trades for memory.

    Args:
        spec: What was asked for.
        strategy: The run's.
        precision: The run's.
        compile: What is compiled.

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
        """Have a model's blocks computed again; before it is sharded or wrapped, and after it is compiled.

        Raises:
            ConfigError: It has no such blocks.
        """
        if self._config.activation_checkpointing:
            self._in_use.append(Recomputation(model, self._config.activation_checkpointing))

    def attach(self, prepared: Prepared) -> None:
        """What is done with the model of a loop of one's own.

        Raises:
            ConfigError: Gradients were to be released, whose window such a loop alone knows.
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
        """What is done with a task that was placed and has its optimizers.

        Args:
            step_module: The task's.
            updaters: Its optimizers'.
            interleaved: Whether its step is a generator that names them.
            progress: The run's, by which one update is told from the next.

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
        """Make everything as it was."""
        in_use, self._in_use = self._in_use, []
        for each in in_use:
            each.remove()
