"""What the memory of a run is used for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.errors import ConfigError
from drivetrain.memory_use import MemoryUse, MemoryWatch
from drivetrain.options import by_name
from drivetrain.quantized_optimizers import compiles_itself

if TYPE_CHECKING:
    from drivetrain.run import Run


@by_name
class MemoryReport(Callback):
    """Watches the second update of a fit, of this process, and tells what its memory was used for.

    The first update makes the optimizers' states, and is no measure of those that follow; of a fit of one
    update it is what is told. Both take up to twice their time, and with small operations some 0.1 ms for
    each; all others take none more. Updates that a loss scale skips do not count.

    Args:
        show: Whether the main rank prints a table, to stderr.

    Attributes:
        use: What was found; None until then.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.use: MemoryUse | None = None
        self._found: MemoryUse | None = None
        self._first = 0
        self._watch: MemoryWatch | None = None

    def on_fit_start(self, run: Run) -> None:
        """Begin to count.

        Raises:
            ConfigError: The task is compiled, so that its operations cannot be seen; or the optimizer is, and
                updates within backward; or DeepSpeed trains it.
        """
        if run.engine.strategy.name == "deepspeed":
            raise ConfigError(
                "MemoryReport with strategy 'deepspeed' (ZeRO): it cannot tell DeepSpeed's buckets,"
                " of gigabytes by default (reduce_bucket_size), from activations. Use it with 'ddp' or 'fsdp'"
            )
        optimizers = [each.optimizer for each in run.engine.updaters.values()]
        if run.engine.memory.releases and any(map(compiles_itself, optimizers)):
            raise ConfigError(
                "MemoryReport cannot tell backward from the updates that torchao's optimizers compile within"
                " it: use release_gradients=False for it"
            )
        if run.engine.compilation.parts:
            raise ConfigError("MemoryReport sees no operation of a compiled task: use compile=False for it")
        self.use = self._found = self._watch = None
        self._first = run.progress.updates

    def on_step_start(self, run: Run) -> None:
        """Watch the first two updates."""
        if run.progress.updates - self._first < 2 and run.window is not None:
            engine = run.engine
            optimizers = [each.optimizer for each in engine.updaters.values()]
            batch = [each.batch for each in run.window.micro_batches]
            self._watch = MemoryWatch(run.task, optimizers, engine.device, batch)
            self._watch.__enter__()

    def on_step_end(self, run: Run) -> None:
        """Tell what was found."""
        watch = self._watch
        if watch is None:
            return
        self._leave()
        made = run.progress.updates - self._first
        if made:
            self._found = watch.use()
        if made == 2:
            self._tell(run, "")

    def on_fit_end(self, run: Run) -> None:
        """Tell of the first update, if there was no other."""
        made = run.progress.updates - self._first
        if made == 1:
            self._tell(run, " (the only one, which makes the optimizer's state)")
        elif not made:
            self._tell(run, ": there was none")

    def _tell(self, run: Run, more: str) -> None:
        self.use = self._found
        if self.show and run.is_main:
            title, _, table = str(self.use or "memory at the peak of an update").partition("\n")
            print(f"{title}{more}", table, sep="\n" if table else "", file=sys.stderr, flush=True)

    def on_exception(self, run: Run) -> None:
        """Watch no more."""
        self._leave()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
