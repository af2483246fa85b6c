"""HTML for the output of a notebook's cell: tables and small curves."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from drivetrain.core.errors import without_secrets

_POINTS = 100
"""The most points of a small curve."""

_WIDTH, _HEIGHT = 120, 24  # of a small curve, in pixels


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


def escaped(value: object) -> str:
    """Return a value as HTML, without the secrets of addresses."""
    return value if isinstance(value, Html) else html.escape(without_secrets(str(value)))


def html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table; its cells are escaped, unless they are `Html`."""
    # A metric's name is long for the head of a narrow column, and may be broken after a slash.
    names = [escaped(each).replace("/", "/<wbr>") for each in head]
    lines = [_row("th", names)] if names else []
    lines += [_row("td", map(escaped, row)) for row in rows]
    return Html(f"<table>{''.join(lines)}</table>")


def _row(tag: str, cells: Iterable[str]) -> str:
    start = f'<{tag} style="text-align:left">'  # by themselves, notebooks put cells to the right
    return f"<tr>{''.join(f'{start}{each}</{tag}>' for each in cells)}</tr>"


def sparkline(values: Sequence[float]) -> Html:
    """Return a small curve in the colour of the text, without the values that are not finite.

    It is empty for fewer than two values. Of many values it has about a hundred, with the last one.
    """
    last, count = len(values) - 1, min(len(values), _POINTS)
    steps = [round(last * each / max(count - 1, 1)) for each in range(count)]
    known = [(each / max(last, 1), values[each]) for each in steps if math.isfinite(values[each])]
    if len(known) < 2:
        return Html()
    low, high = min(value for _, value in known), max(value for _, value in known)
    scale = (_HEIGHT - 2) / ((high - low) or 1)
    points = " ".join(f"{_WIDTH * x:.1f},{_HEIGHT - 1 - scale * (value - low):.1f}" for x, value in known)
    return Html(
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" fill="none"'
        f' stroke="currentColor" stroke-width="1.5" role="img" aria-label="from {known[0][1]:.4g} to'
        f' {known[-1][1]:.4g}, between {low:.4g} and {high:.4g}"><polyline points="{points}"/></svg>'
    )
