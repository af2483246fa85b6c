"""What the memory of a run is used for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.errors import ConfigError
from drivetrain.memory_use import MemoryUse, MemoryWatch
from drivetrain.options import ByName
from drivetrain.quantized_optimizers import compiles_itself

if TYPE_CHECKING:
    from drivetrain.run import Run


class MemoryReport(ByName, Callback):
    """Watches the second update of a fit, of this process, and tells what its memory was used for.

    The first update makes the optimizers' states, and is no measure of those that follow. The watched update
    takes about twice its time; all others take none more.

    Args:
        show: Whether the main rank prints a table, to stderr.

    Attributes:
        use: What was found; None until then.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self.use: MemoryUse | None = None
        self._updates = 0
        self._watch: MemoryWatch | None = None

    def on_fit_start(self, run: Run) -> None:
        """Begin to count.

        Raises:
            ConfigError: The task is compiled, so that its operations cannot be seen; or the optimizer is, and
                updates within backward.
        """
        optimizers = [each.optimizer for each in run.engine.updaters.values()]
        if run.engine.memory.releases and any(map(compiles_itself, optimizers)):
            raise ConfigError(
                "MemoryReport cannot tell backward from the updates that torchao's optimizers compile within"
                " it: use release_gradients=False for it"
            )
        if run.engine.compilation.parts:
            raise ConfigError("MemoryReport sees no operation of a compiled task: use compile=False for it")
        self.use, self._updates, self._watch = None, 0, None

    def on_step_start(self, run: Run) -> None:
        """Watch the second update."""
        if self._updates == 1 and self.use is None and run.window is not None:
            engine = run.engine
            optimizers = [each.optimizer for each in engine.updaters.values()]
            batch = [each.batch for each in run.window.micro_batches]
            self._watch = MemoryWatch(run.task, optimizers, engine.device, batch)
            self._watch.__enter__()

    def on_step_end(self, run: Run) -> None:
        """Tell what was found."""
        self._updates += 1
        if self._watch is not None:
            self.use = self._watch.use()
            self._leave()
            if self.show and run.is_main:
                print(self.use, file=sys.stderr, flush=True)

    def on_exception(self, run: Run) -> None:
        """Watch no more."""
        self._leave()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
