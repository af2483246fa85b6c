"""The progress of a run: a bar on a screen, plain lines in a file."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.progress.lines import joined, short
from drivetrain.callbacks.progress.notebook_bar import Line, notebook_bar_class
from drivetrain.core.errors import plain
from drivetrain.core.notebook.output import in_notebook
from drivetrain.core.validation import by_name
from drivetrain.run.setting_checks import BARS

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_SECONDS_BETWEEN_DRAWINGS = 0.1
_SHOWN_PER_STAGE = 4
_STAGES = ("train", "validation", "test")
_LEAST_BAR = 8
"""The fewest columns of the bar itself; a value that would leave it less is not beside it."""


@by_name
class ProgressBar(Callback):
    """Shows the steps made, the time left and the latest metrics, on stderr of the main rank.

    On a terminal it is a tqdm bar, with a second, transient one during evaluation and prediction. It keeps
    one line per epoch above the bar, with all values. The bar shows as many values as fit in its line, under
    short names (``val loss``) if the full names do not fit.

    In a notebook it is one output of the cell, in HTML: a bar above a table of the latest values, with a row
    for each of the last ten epochs. A fit that ends before its last step leaves a bar that says why.

    Anywhere else, such as a batch system's log file, it is one plain line per `log_every` without control
    characters. The values of a validation between two lines appear in the next::

        epoch 2/3 | step 50/135 | train/loss 0.512 | validation/accuracy 0.93

    With the style "rich" it is a bar of rich on a terminal.

    Args:
        metrics: The names to show. By default the first four of each stage, in the order of logging.
        style: "tqdm" or "rich".

    Raises:
        MissingDependencyError: rich is asked for, and not installed.
    """

    def __init__(self, metrics: Sequence[str] | None = None, *, style: str = "tqdm") -> None:
        self.metrics = metrics
        BARS[style]  # raises where its package is not installed
        self.style = style
        self._fitting = False
        self._epoch = 0
        self._new_bar: Any = None
        self._bar: Any = None
        self._evaluation_bar: Any = None
        self._beside: Line | None = None  # the values for the bar
        self._loader: str | None = None
        self._due = self._unsaid = False
        # The time of the next drawing. Infinity if nothing is drawn: a step then only reads the clock.
        self._next = math.inf

    def on_fit_start(self, run: Run) -> None:
        """Open the bar at the run's current step."""
        if not run.is_main:
            return
        self._fitting = True
        self._epoch = run.progress.epoch + 1
        self._look_for_screen()
        if self._new_bar is not None:
            self._bar = self._new_bar(
                initial=run.progress.steps, total=run.length.steps, desc=self._epoch_text(run), unit="step"
            )

    def on_epoch_start(self, run: Run) -> None:
        """Show the epoch's number."""
        # Stored, because at an epoch's last log point the progress may already count that epoch as complete.
        self._epoch = run.progress.epoch + 1
        if self._bar is not None:
            self._bar.set_description(self._epoch_text(run), refresh=False)

    def on_step_end(self, run: Run) -> None:
        """Draw the bar if it is due."""
        if time.monotonic() >= self._next:
            self._draw(run)

    def on_log(self, run: Run) -> None:
        """Show the latest metrics."""
        if not self._fitting:
            return
        self._unsaid = True
        # The values that other callbacks add to this log point are not among the metrics yet.
        if self._bar is not None:
            self._beside = self._line(run, {**run.metrics, **run.logged})
            return
        of_training = any(run.names.stage_of(name) == "train" for name in run.logged)
        self._due = self._due or of_training or run.triggers.log.every is None

    def on_epoch_end(self, run: Run) -> None:
        """Make the epoch's line due on a terminal."""
        self._due = self._due or (self._bar is not None and self._unsaid)

    def on_save(self, run: Run) -> None:
        """Write the line of this step if it is due, with all values of the step."""
        if self._due and run.stop_reason is None:
            self._print(run)

    def on_evaluation_start(self, run: Run) -> None:
        """Find where to draw, if the evaluation is not part of a fit."""
        if run.is_main and not self._fitting:
            self._look_for_screen()

    def on_evaluation_step_end(self, run: Run) -> None:
        """Draw the evaluation's bar if it is due."""
        if time.monotonic() >= self._next:
            self._draw_evaluation(run)

    def on_evaluation_end(self, run: Run) -> None:
        """Remove the evaluation's bar."""
        self._close_evaluation()

    def on_fit_end(self, run: Run) -> None:
        """Draw the bar a last time and leave it on the screen."""
        if self._unsaid:
            self._print(run)
        if self._bar is not None:
            self._draw(run)
        is_early = run.progress.steps != run.length.steps
        self._close((run.stop_reason or "") if is_early else "")

    def on_exception(self, run: Run) -> None:
        """Leave the bars on the screen, and the terminal at the start of a line."""
        if self._due:
            self._print(run)
        if self._bar is not None:
            self._draw(run)
        is_error = isinstance(run.exception, Exception)
        self._close(f"failed: {type(run.exception).__name__}" if is_error else "interrupted", True)

    def _print(self, run: Run) -> None:
        self._due = self._unsaid = False
        line = self._line(run, run.metrics)
        if self._bar is None:
            print(joined(*line), file=sys.stderr, flush=True)
        else:
            if self._beside:
                self._bar.show_beside(*self._beside)
            self._bar.n = run.progress.steps  # the bar is drawn again, below the line
            self._bar.keep_line(*line)

    def _line(self, run: Run, values: Mapping[str, float]) -> Line:
        steps = _of("step", run.progress.steps, run.length.steps)
        shown = [(name, f"{values[name]:.4g}") for name in self._shown(run, values)]
        return (self._epoch_text(run), steps), shown

    def _look_for_screen(self) -> None:
        self._new_bar = _bar_class(self.style)
        self._beside = None
        self._next = math.inf if self._new_bar is None else 0.0

    def _draw(self, run: Run) -> None:
        if self._beside:
            self._bar.show_beside(*self._beside)
        self._bar.update(run.progress.steps - self._bar.n)
        self._next = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS / self._bar.drawings

    def _draw_evaluation(self, run: Run) -> None:
        evaluation = run.evaluation
        name = run.stage if evaluation.loader is None else plain(f"{run.stage} {evaluation.loader}")
        if self._evaluation_bar is None:
            self._evaluation_bar = self._new_bar(
                total=evaluation.batches, desc=name, unit="batch", leave=False
            )
        elif evaluation.loader != self._loader:
            self._evaluation_bar.reset(total=evaluation.batches)
            self._evaluation_bar.set_description(name, refresh=False)
        self._loader = evaluation.loader
        self._evaluation_bar.update(evaluation.batch + 1 - self._evaluation_bar.n)
        self._next = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS / self._evaluation_bar.drawings

    def _close_evaluation(self, why: str = "", has_failed: bool = False) -> None:
        if self._evaluation_bar is not None:
            self._evaluation_bar.end(why, has_failed)
            self._evaluation_bar = None

    def _close(self, why: str = "", has_failed: bool = False) -> None:
        self._close_evaluation(why, has_failed)
        if self._bar is not None:
            self._bar.end(why, has_failed)
            self._bar = None
        self._fitting = self._due = self._unsaid = False
        self._next = math.inf

    def _epoch_text(self, run: Run) -> str:
        epochs = run.length.epochs
        epoch = self._epoch if epochs is None else min(self._epoch, epochs)  # a finished run begins no other
        return _of("epoch", epoch, epochs)

    def _shown(self, run: Run, names: Iterable[str]) -> list[str]:
        if self.metrics is not None:
            known = set(names)
            return [name for name in self.metrics if name in known]
        by_stage: dict[str, list[str]] = {stage: [] for stage in _STAGES}
        for name in names:
            shown = by_stage.get(run.names.stage_of(name) or "")
            if shown is not None and len(shown) < _SHOWN_PER_STAGE:
                shown.append(name)
        return [name for shown in by_stage.values() for name in shown]


_NARROW = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""A bar for a narrow screen: tqdm's, without the steps per second."""


def _of(what: str, number: int, total: int | None) -> str:
    return f"{what} {number}" if total is None else f"{what} {number}/{total}"


def _bar_class(style: str) -> Any:
    """Return what makes the bars of a run; None where no bar can be drawn."""
    if in_notebook():
        return notebook_bar_class()
    if not _has_screen():
        return None
    if style != "tqdm":
        return BARS[style].of_run()
    from tqdm.std import tqdm

    # tqdm starts a thread that outlives the bar, to redraw stale bars, and makes a lock for several
    # processes, which on some systems starts one. This bar needs neither.
    kept = {"monitor_interval": 0, "_lock": threading.RLock(), "drawings": 1.0}
    methods = {"show_beside": _show_beside, "keep_line": _keep_line, "end": lambda bar, *_: bar.close()}
    # The callback decides when to draw, so tqdm has to draw at each update().
    return partial(type("Bar", (tqdm,), kept | methods), mininterval=0.0, miniters=0, dynamic_ncols=True)


def _keep_line(bar: Any, of: Sequence[str], values: Sequence[tuple[str, str]]) -> None:
    """Print a line above a bar."""
    bar.write(joined(of, values, bar.format_dict["ncols"]), file=bar.fp)


def _show_beside(bar: Any, of: Sequence[str], values: Sequence[tuple[str, str]]) -> None:
    """Put values beside a bar: under full names, or as many as fit under short ones, without the rate."""
    shape = bar.format_dict
    columns = shape["ncols"]
    full = fitting = [" ".join(each) for each in values]
    # Where not all fit, the first of each stage come first: they are often the losses.
    validation = [f"{short(name)} {text}" for name, text in values if name.startswith("validation/")]
    training = [f"{short(name)} {text}" for name, text in values if not name.startswith("validation/")]
    pairs = itertools.zip_longest(training, validation)
    narrow = [text for pair in pairs for text in pair if text]
    for template, texts in ((None, full), (_NARROW, narrow)) if columns else ():
        bar.bar_format = template
        bare = (template or "{l_bar}{bar}{r_bar}").replace("{bar}", "")
        room = columns - _LEAST_BAR - len(bar.format_meter(**shape | {"bar_format": bare, "postfix": None}))
        fitting = list(_fitting(texts, room))
        if len(fitting) == len(texts):
            break
    bar.set_postfix_str(", ".join(fitting), refresh=False)


def _fitting(texts: Iterable[str], room: int) -> Iterator[str]:
    for text in texts:
        room -= len(text) + 2
        if room >= 0:
            yield text


def _has_screen() -> bool:
    """Return whether stderr is a terminal that can move its cursor and knows its width, and no log of CI."""
    is_log = os.environ.get("TERM") == "dumb" or os.environ.get("CI", "") not in ("", "0", "false")
    if is_log or sys.stderr is None or not sys.stderr.isatty():
        return False
    return all(os.get_terminal_size(sys.stderr.fileno()))  # tqdm draws nothing on a screen without rows
