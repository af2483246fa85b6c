"""Values as a table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"<tr>{_cells('th', head)}</tr>"] if head else []
    lines += [f"<tr>{_cells('td', row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _cells(tag: str, values: Iterable[object]) -> str:
    return "".join(f"<{tag}>{html.escape(str(each))}</{tag}>" for each in values)


class NotebookTable:
    """A table in the output of a notebook's cell, which each `show` replaces."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, content: str) -> None:
        """Show HTML in place of what was shown before."""
        from IPython import display

        shown: Any = display
        if self._shown is None:
            self._shown = shown.display(shown.HTML(content), display_id=True)
        else:
            self._shown.update(shown.HTML(content))
