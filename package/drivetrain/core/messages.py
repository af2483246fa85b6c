"""The library's messages at run time: one logger, "drivetrain", with a child for each module that has any.

`info` is for progress, `warning` for what the user should act on, `error` for a part that failed. The output
of a command, the progress bar, and what a process writes as it ends are printed. Tables in all of these are
made by `columns`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from drivetrain.core.errors import ConfigError, nearest, shown
from drivetrain.core.notebook.output import in_notebook

NAME = "drivetrain"
LEVEL_VARIABLE = "DRIVETRAIN_LOG_LEVEL"


def logger(module: str) -> logging.Logger:
    """Return the logger of a module of drivetrain, by its `__name__`."""
    made = logging.getLogger(module)
    made.addFilter(_as_shown)
    return made


def _as_shown(record: logging.LogRecord) -> bool:
    record.msg, record.args = shown(record.getMessage()), ()
    return True


class _DefaultHandler(logging.Handler):
    """Writes messages to today's stderr, unless the program has given the logger or its parents a handler.

    In a notebook progress goes to stdout.
    """

    def emit(self, record: logging.LogRecord) -> None:
        # A notebook colours stderr as an error.
        stream = sys.stdout if record.levelno < logging.WARNING and in_notebook() else sys.stderr
        if _has_other_handlers(record.name, self) or stream is None:
            return
        try:
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except Exception:  # as logging's own handlers: a closed stream ends no run
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        is_table = record.levelno < logging.WARNING and "\n" in text
        return text if is_table else f"{NAME}: {text}"


class Listener(logging.NullHandler):
    """Passes messages to a function, beside whatever shows them."""

    def __init__(self, level: int, hear: Callable[[str], None]) -> None:
        super().__init__(level)
        self._hear = hear

    def handle(self, record: logging.LogRecord) -> bool:
        self._hear(record.getMessage())
        return True


def _has_other_handlers(name: str, own: logging.Handler) -> bool:
    current: logging.Logger | None = logging.getLogger(name)
    while current is not None:
        if any(each is not own and not isinstance(each, logging.NullHandler) for each in current.handlers):
            return True
        current = current.parent if current.propagate else None
    return False


_ours: int | None = None
"""The level that was set here; None if the program had set one before."""


def _set_up() -> None:
    global _ours
    root = logging.getLogger(NAME)
    root.addHandler(_DefaultHandler())
    if root.level == logging.NOTSET:
        _ours = _default_level()
        root.setLevel(_ours)


def _default_level() -> int:
    given = os.environ.get(LEVEL_VARIABLE, "").strip()
    if not given:
        return logging.INFO
    level = logging.getLevelNamesMapping().get(given.upper())
    if level is None and given.isdigit():
        level = int(given)
    if level is None:
        allowed = ("debug", "info", "warning", "error", "critical")
        raise ConfigError(f"{LEVEL_VARIABLE}={given!r} is no level. {nearest(given, allowed)}")
    return level


def set_rank(rank: int) -> None:
    """Report warnings only on all ranks but the first, unless the program has set a level itself."""
    global _ours
    root = logging.getLogger(NAME)
    if _ours is not None and root.level == _ours:
        _ours = _default_level() if rank == 0 else max(_default_level(), logging.WARNING)
        root.setLevel(_ours)


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Have a handler receive the messages inside the block: in place of stderr, unless it is a `Listener`."""
    root = logging.getLogger(NAME)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


_set_up()


def columns(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Return a line for each row, with its cells below those of the other rows."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if number in numbers else str.ljust for number in range(len(widths))]
    return ["  ".join(map(lambda pad, *each: pad(*each), aligned, row, widths)).rstrip() for row in rows]


def sized(count: float) -> str:
    """Return a number of bytes with its unit: "1.2 GB"."""
    size, units = float(count), iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while round(size, 1) >= 1000 and (bigger := next(units, None)):
        size, unit = size / 1000, bigger
    if unit == "bytes":
        return f"{count:.0f} bytes"
    return f"{size:.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"
