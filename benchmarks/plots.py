"""Plots of tables whose columns are contestants."""

from __future__ import annotations

import re
from pathlib import Path

from report import Table

_INK = [
    "#1b6ca8",
    "#e07b39",
    "#3a9d6e",
    "#b03a48",
    "#7a5fa8",
    "#8c6d46",
    "#d06fa8",
    "#6b7280",
    "#b8a52b",
    "#2aa7b8",
]


def plot(table: Table, contestants: list[str], directory: Path) -> list[Path]:
    """Draw a table.

    Args:
        table: Its columns are contestants, and perhaps others.
        contestants: All of them, in the order of their colours.
        directory: Where the PNG goes.

    Returns:
        The files; none where matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return []
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = [name for name in table.columns if name in contestants]
    if not columns or not table.rows:
        return []
    height = 1.2 + 0.17 * len(table.rows) * (len(columns) + 1)
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    values = [cell.value for _, cells in table.rows for cell in cells if cell.value is not None]
    for which, name in enumerate(columns):
        cells = [row[table.columns.index(name)] for _, row in table.rows]
        shown = [(at, cell) for at, cell in enumerate(cells) if cell.value is not None]
        places = [at + (which + 1) / (len(columns) + 1) - 0.5 for at, _ in shown]
        bars = axes.barh(
            places,
            [cell.value for _, cell in shown],
            height=0.9 / (len(columns) + 1),
            label=name,
            color=_INK[contestants.index(name) % len(_INK)],
        )
        axes.bar_label(bars, [f" {cell.value:.4g}" for _, cell in shown], fontsize=6)
    axes.set_yticks(range(len(table.rows)), [name for name, _ in table.rows])
    axes.invert_yaxis()
    if max(values) > 50 * sorted(map(abs, values))[len(values) // 2]:
        axes.set_xscale("symlog", linthresh=max(1.0, sorted(map(abs, values))[len(values) // 2]))
    axes.set_xlabel(table.unit, fontsize=8)
    axes.set_title(table.title)
    axes.legend(fontsize=7, loc="best")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '-', table.title.lower()).strip('-')}.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]
