"""The picture of what a library adds to a step: `python docs/site/draw_overhead.py` writes it.

It shows docs/explanation/overhead.json, which has the form of the results.json of `make bench`. With --table
it prints the rows of the first table of docs/explanation/benchmarks.md, which has the same numbers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

EXPLANATION = Path(__file__).parents[1] / "explanation"
RESULTS = EXPLANATION / "overhead.json"
PICTURE = EXPLANATION / "overhead.svg"

OURS = "drivetrain"
BARE, FULL = "DataLoader, bare", "DataLoader, everything on"

WIDTH, LEFT, BARS, TOP, ROW, BAR = 480, 150, 264, 118, 36, 12
"""In pixels: the width, the left end of the bars, the longest bar, the first row, and two heights."""


def stored() -> Any:
    """Return the results, with their command, day, machine and versions."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def source() -> str:
    """Return the day and the machine of the results, in words."""
    results = stored()
    host, torch = results["host"].split(", Python")[0], results["versions"]["torch"].split("+")[0]
    return f"{results['begun'][:10]}, {host}, torch {torch}"


def added() -> dict[str, dict[str, float]]:
    """Return the microseconds that a library adds to the hand-written loop's step, by library and row."""
    (table,) = stored()["tables"]
    found: dict[str, dict[str, float]] = {}
    for row in table["rows"]:
        for name, value in row.items():
            if isinstance(value, float):
                found.setdefault(name, {})[row["row"]] = value
    return found


def whole(value: float) -> str:
    """Return a difference in whole microseconds, with its sign."""
    return f"{round(value):+,}"


def table() -> list[str]:
    """Return the rows of the page's table, as Markdown."""
    lines = []
    for name, values in added().items():
        shown = f"**{name}**" if name == OURS else name
        lines.append(f"| {shown} | {' | '.join(whole(value) for value in values.values())} |")
    return lines


def draw() -> str:
    """Return the picture as SVG."""
    found = added()
    order = sorted(found, key=lambda name: found[name][FULL])
    longest = max(found[name][FULL] for name in order)
    shapes: list[str] = []
    for number, name in enumerate(order):
        y = TOP + number * ROW
        kind = "ours" if name == OURS else "other"
        shapes.append(f'<text x="{LEFT - 10}" y="{y + 17}" class="name {kind}">{escape(name)}</text>')
        for place, (row, series) in enumerate(((BARE, "bare"), (FULL, "full"))):
            value, top = found[name][row], y + place * (BAR + 2)
            width = max(1.5, value / longest * BARS)
            shapes.append(
                f'<rect x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" class="{kind} {series}"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{top + 10}" class="value">{whole(value)}</text>'
            )
    end = TOP + len(order) * ROW
    height = end + 28
    drawn = "\n".join(shapes)
    spoken = "; ".join(f"{name} {whole(found[name][BARE])} and {whole(found[name][FULL])}" for name in order)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"
  width="{WIDTH}" height="{height}" role="img" aria-labelledby="title description">
<title id="title">Microseconds that each library adds to a step of a hand-written loop</title>
<desc id="description">Bare, and with everything on: {escape(spoken)}. {escape(source())}.</desc>
<style>
  text {{ font: 13px system-ui, sans-serif; fill: #1f2330; }}
  .head {{ font-size: 15px; font-weight: 600; }}
  .name {{ text-anchor: end; }}
  .name.ours {{ font-weight: 600; }}
  .value {{ font-size: 12px; font-variant-numeric: tabular-nums; }}
  .source {{ font-size: 11px; text-anchor: end; }}
  .page {{ fill: #ffffff; stroke: #d5d8e2; }}
  .axis {{ stroke: #8b90a1; }}
  .other.bare {{ fill: #555a6b; }}
  .other.full {{ fill: #8f94a5; }}
  .ours.bare {{ fill: #0a6c70; }}
  .ours.full {{ fill: #4fa5a5; }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #e6e8ef; }}
    .page {{ fill: #12151c; stroke: #3a3f4d; }}
    .axis {{ stroke: #7f8596; }}
    .other.bare {{ fill: #c3c7d4; }}
    .other.full {{ fill: #7f8596; }}
    .ours.bare {{ fill: #8fe0db; }}
    .ours.full {{ fill: #4fa5a5; }}
  }}
</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="page"/>
<text x="16" y="28" class="head">Microseconds added to a hand-written loop's step</text>
<text x="16" y="48">Linear(32, 2), batches of 8 from a DataLoader, CPU; less is better</text>
<rect x="16" y="63" width="12" height="{BAR}" class="other bare"/>
<text x="34" y="73">bare</text>
<rect x="16" y="83" width="12" height="{BAR}" class="other full"/>
<text x="34" y="93">with progress bar, TensorBoard, CSV, the loss and a metric</text>
<line x1="{LEFT}" y1="{TOP - 6}" x2="{LEFT}" y2="{end - 4}" class="axis"/>
{drawn}
<text x="{WIDTH - 16}" y="{end + 14}" class="source">{escape(source())}</text>
</svg>
"""


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        print("\n".join(table()))
    else:
        PICTURE.write_text(draw(), encoding="utf-8")
