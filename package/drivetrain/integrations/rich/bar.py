"""A progress bar of rich, with the methods of tqdm's that `ProgressBar` calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from drivetrain.callbacks.progress.lines import joined, short
from drivetrain.core.errors import MissingDependencyError

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
except ImportError:
    raise MissingDependencyError("rich", "rich", "Trainer(progress_bar='rich')") from None

_BAR = 20
_TIMES = 18  # columns of the times and the spaces between
_LEAST = 4


class RichBar:
    """A bar. The bars of one run share a display, which ends with the last of them."""

    progress: ClassVar[Progress]
    drawings = 0.2
    """How often it is drawn, compared with tqdm's bar: drawing takes 2 ms, ten times as long."""

    @classmethod
    def of_run(cls) -> type[RichBar]:
        """Return the class of the bars of one run, which share a display on stderr."""
        columns = [
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}", markup=False),
        ]
        # Without a thread that draws: the callback decides when.
        display = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        return type("Bar", (cls,), {"progress": display})

    def __init__(
        self, *, total: int | None, desc: str, initial: int = 0, unit: str = "step", leave: bool = True
    ) -> None:
        self.n = initial
        self._total, self._leave = total, leave
        self._task = self.progress.add_task(desc, total=total, completed=initial, values="")
        self.progress.start()
        self.progress.refresh()

    def set_description(self, text: str, refresh: bool = True) -> None:
        self.progress.update(self._task, description=text, refresh=refresh)

    def update(self, steps: int) -> None:
        self.n += steps
        self.progress.update(self._task, completed=self.n, refresh=True)

    def reset(self, total: int | None) -> None:
        self.n, self._total = 0, total
        self.progress.reset(self._task, total=total, completed=0)

    def show_beside(self, of: Sequence[str], values: Sequence[tuple[str, str]]) -> None:
        """Put values behind the bar: under full names, or as many as fit under short ones."""
        steps = len(f" {self._total or self.n}/{self._total or '?'} ")
        description = self.progress.tasks[0].description
        room = self.progress.console.width - len(description) - _BAR - _TIMES - steps - _LEAST
        full = ", ".join(map(" ".join, values))
        shown = [full] if len(full) <= room else []
        for name, value in () if shown else values:
            if len(", ".join([*shown, text := f"{short(name)} {value}"])) <= room:
                shown.append(text)
        self.progress.update(self._task, values=", ".join(shown))

    def keep_line(self, of: Sequence[str], values: Sequence[tuple[str, str]]) -> None:
        """Print a line above the bar."""
        self.progress.update(self._task, completed=self.n, refresh=True)
        console = self.progress.console
        console.print(joined(of, values, console.width), markup=False, highlight=False, soft_wrap=True)

    def end(self, why: str = "", has_failed: bool = False) -> None:
        if self._leave:
            self.progress.stop_task(self._task)
            self.progress.refresh()
        else:
            self.progress.remove_task(self._task)
        if all(each.stop_time is not None for each in self.progress.tasks):
            self.progress.stop()
