"""The lines of a terminal: short names, and breaks between values."""

from __future__ import annotations

from collections.abc import Sequence


def short(name: str) -> str:
    """Return a metric's name for a narrow screen: "loss" for "train/loss", "val loss" for validation's."""
    return name.removeprefix("train/").replace("validation/", "val ", 1)


def joined(of: Sequence[str], values: Sequence[tuple[str, str]], columns: int | None = None) -> str:
    """Return a line of its subject and its values by name, broken between two where the screen ends."""
    first, *rest = (*of, *map(" ".join, values))
    lines = [first]
    for part in rest:
        if columns and len(lines[-1]) + len(part) + 3 > columns:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" | {part}"
    return "\n".join(lines)
