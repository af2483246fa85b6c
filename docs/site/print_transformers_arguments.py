"""The tables of docs/how-to/transformers-arguments.md, printed from the data.

`python docs/site/print_transformers_arguments.py` writes them there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from drivetrain.integrations.transformers.arguments_table import OPTIMIZERS, ROWS, Row

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "transformers-arguments.md"
BEGIN, END = "<!-- The tables are printed from arguments_table.py. -->\n", "<!-- The end of the tables. -->\n"


def _rows(rows: Iterable[Row]) -> Iterable[str]:
    yield "| option | | here, or the reason |"
    yield "| --- | --- | --- |"
    for each in rows:
        yield f"| `{each.name}` | {each.status} | {each.text.replace('|', chr(92) + '|')} |"


def table() -> str:
    """Return the tables as Markdown."""
    rows = sorted(ROWS.values(), key=lambda each: each.name)
    lines = ["## Options of version 5", "", *_rows(each for each in rows if not each.is_old), ""]
    lines += ["## Older names", "", *_rows(each for each in rows if each.is_old), ""]
    lines += ["## Optimizers", "", "| `optim` | here, or what to use instead |", "| --- | --- |"]
    lines += [
        f"| `{name}` | {'' if each.here else 'refused: '}{each.text} |" for name, each in OPTIMIZERS.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
