"""The picture of the layers, drawn from the package's imports: `python docs/site/draw_layers.py` writes it.

A row is a folder of the package, the ground at the bottom. A dot stands where the row's layer imports the
column's: all dots lie below the diagonal, since imports only go down.
"""

from __future__ import annotations

import ast
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "package" / "drivetrain"
PICTURE = ROOT / "docs" / "explanation" / "layers.svg"

LAYERS = {
    "cli": "the command",
    "testing": "the public kit for tests",
    "trainer": "from arguments to a run, and the verbs; plan/",
    "callbacks": "what watches or steers a run",
    "run": "one fit or evaluation in progress",
    "loggers": "where numbers go",
    "engine": "one step; metrics/",
    "strategies": "where a step runs; precision/, transforms/",
    "task": "what the user writes; optim/",
    "data": "from a user's data to micro-batches; workers/",
    "checkpoint": "what is on disk",
    "distributed": "ranks and collectives; launch/, failure/",
    "core": "errors, types, intervals, progress, registry",
}
"""From the top to the ground."""

WIDTH, HEIGHT, COLUMN, LEFT, TOP = 450, 36, 24, 12, 104


def layers_imported(layer: str) -> set[str]:
    """Return the other layers that the files of a layer import anywhere, for types too."""
    found = set()
    for path in (PACKAGE / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain."):
                found.add(str(node.module).split(".")[1])
    return (found & LAYERS.keys()) - {layer}


def draw() -> str:
    """Return the picture as SVG."""
    names = list(LAYERS)
    columns = {name: LEFT + WIDTH + 26 + number * COLUMN for number, name in enumerate(reversed(names))}
    drawn = []
    for name, x in columns.items():
        drawn.append(f'<text transform="translate({x + 5} {TOP - 10}) rotate(-60)">{name}</text>')
    for number, (name, text) in enumerate(LAYERS.items()):
        y = TOP + number * HEIGHT
        middle = y + HEIGHT // 2 - 3
        drawn.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT - 6}" rx="4"/>')
        drawn.append(f'<text x="{LEFT + 12}" y="{middle + 5}" class="name">{name}</text>')
        drawn.append(f'<text x="{LEFT + 112}" y="{middle + 5}">{escape(text)}</text>')
        imported = layers_imported(name)
        for other, x in columns.items():
            kind = "own" if other == name else "yes" if other in imported else "no"
            drawn.append(f'<circle cx="{x}" cy="{middle}" r="{2 if kind == "no" else 6}" class="{kind}"/>')
    width, height = LEFT + WIDTH + 26 + len(names) * COLUMN + 40, TOP + len(names) * HEIGHT + 6
    shapes = "\n".join(drawn)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
  aria-label="The thirteen layers of drivetrain, and which of the others each of them imports">
<style>
  svg {{ background: #fff; }}
  rect {{ fill: #eef1fb; stroke: #3f51b5; }}
  text {{ font: 14px system-ui, sans-serif; fill: #1b1f3b; }}
  .name {{ font-weight: 600; }}
  .yes {{ fill: #3f51b5; }}
  .no {{ fill: #c5cae9; }}
  .own {{ fill: none; stroke: #c5cae9; stroke-width: 2; }}
</style>
{shapes}
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
