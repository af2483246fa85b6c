"""The tables of docs/reference/lightning-arguments.md, printed from the data.

`python docs/site/print_lightning_arguments.py` writes them there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from drivetrain.integrations.lightning.arguments_table import (
    CALLBACKS,
    LOGGERS,
    OTHERS,
    PRECISIONS,
    ROWS,
    STRATEGIES,
    LightningRow,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "lightning-arguments.md"
BEGIN, END = "<!-- The tables are printed from arguments_table.py. -->\n", "<!-- The end of the tables. -->\n"


def _rows(title: str, rows: Iterable[LightningRow]) -> Iterator[str]:
    yield f"| {title} | | here, or the reason | what differs |"
    yield "| --- | --- | --- | --- |"
    for each in sorted(rows, key=lambda row: row.name):
        yield f"| `{each.name}` | {each.status} | {each.text} | {each.differs} |"


def table() -> str:
    """Return the tables as Markdown."""
    lines = ["## Arguments", "", *_rows("argument", ROWS.values()), ""]
    lines += ["## Strategies", "", *_rows("`strategy`", STRATEGIES.values()), ""]
    lines += ["## Precisions", "", "| `precision` | here |", "| --- | --- |"]
    lines += [f'| "{name}" | "{ours}" |' for name, ours in PRECISIONS.items()]
    lines += ["", "## Callbacks", "", *_rows("class", CALLBACKS.values()), ""]
    lines += ["## Loggers", "", *_rows("class", LOGGERS.values()), ""]
    lines += ["## Beside the Trainer", "", "| name | here |", "| --- | --- |"]
    lines += [f"| `{name}` | {text} |" for name, text in OTHERS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
