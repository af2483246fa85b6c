"""Printing for commands: tables, sizes and JSON. Text from files cannot control the terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.core.errors import plain, without_secrets
from drivetrain.core.messages import columns

_SHORT = 60
"""The most characters that `shortened` returns."""


def shortened(value: Any) -> str:
    """Return a value as a text, truncated to 60 characters."""
    text = plain(value if isinstance(value, str) else json.dumps(_strict(value), ensure_ascii=False))
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."


def line(text: str = "") -> None:
    print(plain(without_secrets(text)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> None:
    """Print columns; nothing when there are no rows.

    Args:
        numbers: The columns to align to the right.
    """
    if not rows:
        return
    every = [[plain(cell) for cell in row] for row in ([head, *rows] if head else rows)]
    print("\n".join(columns(every, numbers)))


def section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title, and below it names with their values, wrapped; nothing when there are no rows."""
    if not rows:
        return
    print(f"\n{plain(title)}")
    room = shutil.get_terminal_size((80, 24)).columns
    names = [plain(name) for name, _ in rows]
    widest = min(max(map(len, names)), room // 2)
    for name, (_, value) in zip(names, rows, strict=True):
        begin = f"  {name.ljust(widest)}  "
        wrapped = textwrap.wrap(
            plain(value),
            max(room, widest + 24),
            initial_indent=begin,
            subsequent_indent=" " * (widest + 4),
            break_on_hyphens=False,
            break_long_words=False,  # so that a path or an address can be copied
        )
        print("\n".join(wrapped or [begin.rstrip()]))


def span(seconds: float) -> str:
    """Return a span of time in its two largest units: "2 h 05 min"."""
    for unit, length, lower, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} {seconds % length // part:02.0f} {lower}"
    return f"{max(seconds, 0.0):.1f} s"


def print_json(value: Any) -> None:
    """Print strict JSON; a dataclass is an object of its fields."""
    sys.stdout.write(json.dumps(_strict(value), indent=2) + "\n")


def _strict(value: Any) -> Any:
    """Replace numbers that strict JSON lacks by texts that Python's ``float`` can parse."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def any_text() -> Iterator[None]:
    """Run the block with escapes for characters that stdout cannot encode, and flush stdout at its end."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
        stream.flush()  # raises here, where it can be handled; at its exit, Python prints a traceback
    finally:
        stream.reconfigure(errors=before)
