"""The time that a run spends on compiling."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)


@by_name
class CompileTime(Callback):
    """Prints once how long compiling took, and subtracts it from the time of training.

    `Trainer(compile=True)` adds one to its runs. `run.timing["compile"]` counts the seconds of torch.compile
    in training and evaluation; `run.timing["compute"]` and `run.timing["evaluation"]` exclude them. These
    seconds are not logged, because they say nothing about the training.

    Args:
        show: Whether the main rank prints the seconds, and what was compiled, to stderr after the first step
            that compiled anything.
    """

    def __init__(self, show: bool = True) -> None:
        self.show = show
        self._run: Run | None = None
        self._begun = 0.0
        self._before = 0.0
        self._is_shown = False

    def on_fit_start(self, run: Run) -> None:
        """Start listening to the compiler."""
        from torch._dynamo.callback import callback_handler

        self._is_shown = not self.show or not run.is_main
        self._before = run.timing.setdefault("compile", 0.0)  # a resumed run has a count
        self._run = run
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def on_step_end(self, run: Run) -> None:
        """Report after the first step that compiled anything."""
        if self._is_shown:
            return
        seconds = run.timing["compile"] - self._before
        if seconds > 0:
            self._is_shown = True
            parts = run.engine.compilation.parts
            what = ", ".join(f"{number} x {kind}" for kind, number in parts.items())
            _LOG.info(f"compiled {what} in {seconds:.1f} s")

    def _start(self, _: object) -> None:
        self._begun = perf_counter()

    def _end(self, _: object) -> None:
        run = self._run
        if run is None:
            return
        seconds = perf_counter() - self._begun
        run.timing["compile"] += seconds
        # The enclosing timer adds its whole time later.
        run.timing["compute" if run.stage == "train" else "evaluation"] -= seconds

    def _leave(self, run: Run) -> None:
        if self._run is None:
            return
        from torch._dynamo.callback import callback_handler

        self._run = None
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    on_fit_end = on_exception = _leave
