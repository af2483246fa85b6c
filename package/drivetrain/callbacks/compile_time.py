"""How long a run compiled."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback

if TYPE_CHECKING:
    from drivetrain.run import Run


class CompileTime(Callback):
    """Tells once how long compiling took, and takes it out of the time that training did.

    A run with `Trainer(compile=True)` has it by itself. `run.timing["compile"]` has the seconds that
    torch.compile took in all, of training and of evaluations, and `run.timing["compute"]` and
    `run.timing["evaluation"]` do not. No log has them: they are no property of what is trained.

    Args:
        show: Whether the main rank prints them after the first update that compiled anything, with what was
            compiled, to stderr.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self._run: Run | None = None
        self._begun = 0.0
        self._before = 0.0
        self._told = False

    def on_fit_start(self, run: Run) -> None:
        """Begin to listen to the compiler."""
        from torch._dynamo.callback import callback_handler

        self._told = not self.show or not run.is_main
        self._before = run.timing.setdefault("compile", 0.0)  # of the run that is resumed
        self._run = run
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def on_step_end(self, run: Run) -> None:
        """Tell it after the first update that compiled anything."""
        if self._told:
            return
        seconds = run.timing["compile"] - self._before
        if seconds > 0:
            self._told = True
            parts = run.engine.compilation.parts
            what = ", ".join(f"{number} x {kind}" for kind, number in parts.items())
            print(f"compiled {what} in {seconds:.1f} s", file=sys.stderr, flush=True)

    def on_fit_end(self, run: Run) -> None:
        """Listen no more."""
        self._leave()

    def on_exception(self, run: Run) -> None:
        """Listen no more."""
        self._leave()

    def _start(self, _: object) -> None:
        self._begun = perf_counter()

    def _end(self, _: object) -> None:
        run = self._run
        if run is None:
            return
        seconds = perf_counter() - self._begun
        run.timing["compile"] += seconds
        # What is around it adds all of its own time later.
        run.timing["compute" if run.stage == "train" else "evaluation"] -= seconds

    def _leave(self) -> None:
        if self._run is None:
            return
        from torch._dynamo.callback import callback_handler

        self._run = None
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)
