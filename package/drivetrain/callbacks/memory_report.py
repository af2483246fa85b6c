"""A report of what a run's memory is used for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name
from drivetrain.engine.memory_profile import MemoryUse, MemoryWatch

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)


@by_name
class MemoryReport(Callback):
    """Watches the second step of a fit in this process, and reports what its memory was used for.

    The first step is not typical: it makes the optimizers' states. The second takes some 0.05 ms longer for
    each of its operations; all others take no longer. Steps that are skipped because of the loss scale do not
    count.

    Args:
        show: Whether the main rank prints a table to stderr.

    Attributes:
        use: The result; None until the second step, and after a fit of one step.

    Raises:
        ConfigError: At the start of a fit: the task is compiled.
        StrategyError: When a Trainer is made: DeepSpeed, or XLA.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.use: MemoryUse | None = None
        self._first = 0
        self._watch: MemoryWatch | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the operations of a step can be observed.

        Raises:
            StrategyError: The task runs on XLA, or is trained by DeepSpeed.
        """
        if strategy.name == "deepspeed":
            raise StrategyError(
                "MemoryReport with strategy 'deepspeed' (ZeRO): it cannot tell DeepSpeed's buckets,"
                " of gigabytes by default (reduce_bucket_size), from activations. Use it with 'ddp' or 'fsdp'"
            )
        if strategy.device.type == "xla":
            raise StrategyError(
                f"MemoryReport with strategy {strategy.name!r}: it cannot see the operations on XLA, which"
                " compiles each step as a whole. Leave it out"
            )

    def on_fit_start(self, run: Run) -> None:
        """Start counting steps.

        Raises:
            ConfigError: The task is compiled.
        """
        if run.engine.compilation.parts:
            raise ConfigError("MemoryReport cannot see the operations of a compiled task. Use compile=False")
        self.use = self._watch = None
        self._first = run.progress.steps

    def on_step_start(self, run: Run) -> None:
        """Watch the second step."""
        if run.progress.steps - self._first == 1 and run.window is not None:
            engine = run.engine
            optimizers = [each.optimizer for each in engine.updaters.values()]
            batch = [each.batch for each in run.window.micro_batches]
            self._watch = MemoryWatch(run.task, optimizers, engine.device, batch)
            self._watch.__enter__()

    def on_step_end(self, run: Run) -> None:
        """Report the result."""
        watch = self._watch
        self._leave()
        if watch is not None and run.progress.steps - self._first == 2:
            self.use = watch.use()
            self._show(run, str(self.use))

    def on_fit_end(self, run: Run) -> None:
        """Report if there was no second step."""
        if self.use is None:
            self._show(run, "MemoryReport: this fit has no second step, the one that is watched")

    def _show(self, run: Run, text: str) -> None:
        if self.show and run.is_main:
            _LOG.info(text)

    def on_exception(self, run: Run) -> None:
        """Stop watching."""
        self._leave()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
