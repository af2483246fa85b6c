"""A progress bar in the output of a notebook's cell, as HTML."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

from drivetrain.callbacks.progress.lines import joined
from drivetrain.core.notebook.html import escaped, html_table
from drivetrain.core.notebook.output import NotebookOutput

_ROWS = 10
"""The most kept lines: each drawing sends all of them."""

_COUNTS = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
"""As in a terminal: the steps, the time of them, the time left, and the speed."""

_GOING, _FAILED = "#3b82d0", "#d93025"

Line: TypeAlias = tuple[Sequence[str], Sequence[tuple[str, str]]]
"""The subject of a line, such as the epoch and the step, and its values by name."""


class NotebookBar:
    """A bar. The bars of one run share an output, with a table of the kept lines and of the last values."""

    output: ClassVar[NotebookOutput]
    bars: ClassVar[list[NotebookBar]]
    lines: ClassVar[deque[Line]]
    drawings = 0.5
    """How often it is drawn, compared with a terminal's bar: the browser has to draw it too."""

    def __init__(
        self, *, total: int | None, desc: str, initial: int = 0, unit: str = "step", leave: bool = True
    ) -> None:
        self._name, self._unit, self._leave = desc, unit, leave
        self.latest: Line | None = None
        self._ending, self._color, self._has_ended = "", _GOING, False
        self.reset(total, initial)
        self.bars.append(self)
        self._draw()

    def reset(self, total: int | None, n: int = 0) -> None:
        self.n, self._initial, self._total, self._begun = n, n, total, time.monotonic()

    def set_description(self, text: str, refresh: bool = True) -> None:
        self._name = text

    def update(self, steps: int) -> None:
        self.n += steps
        self._draw()

    def show_beside(self, *line: *Line) -> None:
        """Show values in the table's last row, in place of those before."""
        self.latest = line

    def keep_line(self, *line: *Line) -> None:
        """Add a row to the table."""
        self.lines.append(line)
        self.latest = line
        self._draw()

    def end(self, why: str = "", has_failed: bool = False) -> None:
        """Leave the bar, with the reason of an early end; remove that of an evaluation inside a fit."""
        self._ending, self._color, self._has_ended = why, _FAILED if has_failed else _GOING, True
        if not why:
            self.n = self._total or self.n
        if len(self.bars) > 1 and not self._leave:
            self.bars.remove(self)
        self._draw()

    def _draw(self) -> None:
        lines, latest = [*self.lines], self.bars[0].latest
        if latest is not None and latest not in lines:
            lines.append(latest)
        names = dict.fromkeys(name for _, values in lines for name, _ in values)
        rows = [(", ".join(of), *(dict(values).get(name, "") for name in names)) for of, values in lines]
        table = html_table(("", *names), rows) if rows else ""
        plain = [*(joined(*each) for each in lines), *(each.text() for each in self.bars)]
        self.output.show("".join([*(each.html() for each in self.bars), table]), "\n".join(plain))

    def text(self) -> str:
        steps = f"{self._unit} {self.n}/{self._total or '?'}"
        return " | ".join(filter(None, (self._name, steps, self._ending)))

    def html(self) -> str:
        from tqdm.std import tqdm

        at = f' value="{self.n}" max="{self._total or max(self.n, 1)}"'
        if self._total is None and not self._has_ended:
            at = ""  # the browser shows that the end is unknown
        style = f"width:16em;max-width:100%;accent-color:{self._color}"
        seconds = time.monotonic() - self._begun
        options = {"initial": self._initial, "unit": self._unit, "bar_format": _COUNTS}
        counts = tqdm.format_meter(self.n, self._total, seconds, **options)
        parts = [escaped(self._name), f'<progress{at} style="{style}"></progress>', escaped(counts)]
        parts += [f"<b>{escaped(self._ending)}</b>"] * bool(self._ending)
        spans = "".join(f"<span>{each}</span>" for each in parts)
        return f'<div style="display:flex;flex-wrap:wrap;align-items:center;gap:0 1em">{spans}</div>'


def notebook_bar_class() -> type[NotebookBar]:
    """Return the class of the bars of one run, which share an output."""
    return type("Bar", (NotebookBar,), {"output": NotebookOutput(), "bars": [], "lines": deque(maxlen=_ROWS)})
