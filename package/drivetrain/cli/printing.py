"""How commands print: tables and JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns; nothing when there are no rows.

    Args:
        head: The columns' names, or none.
        rows: The cells.
    """
    if not rows:
        return
    every = [tuple(head), *map(tuple, rows)] if head else [tuple(row) for row in rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(every[0]))]
    for row in every:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def sized(count: int) -> str:
    """A number of bytes with its unit: "1.2 GB"."""
    size, units = float(count), iter(("bytes", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while size >= 1000 and (bigger := next(units, None)):
        size, unit = size / 1000, bigger
    return f"{count} bytes" if unit == "bytes" else f"{size:.3g} {unit}"


def print_json(value: Any) -> None:
    """Print strict JSON."""
    sys.stdout.write(json.dumps(_strict(value), indent=2) + "\n")


def _strict(value: Any) -> Any:
    """Numbers that JSON has no word for as texts that Python's ``float`` takes back."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _strict(each) for key, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, (list, tuple)) else value
