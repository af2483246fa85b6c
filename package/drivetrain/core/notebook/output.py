"""The output of a notebook's cell."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.core.errors import MissingDependencyError

if TYPE_CHECKING:
    from drivetrain.core.notebook.figure import NotebookFigure


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, or a copy of it that ipykernel lets send."""
    ipython: Any = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    own = getattr(getattr(kernel, "session", None), "pid", os.getpid())
    return kernel is not None and own == os.getpid()


class NotebookOutput:
    """A part of a cell's output, which each `show` replaces."""

    def __init__(self) -> None:
        self._shown: Any = None

    def show(self, content: str, text: str) -> None:
        """Show HTML, and plain text where the front end has no HTML."""
        from IPython import display

        shown: Any = display
        data = {"text/html": content, "text/plain": text}
        if self._shown is None:
            self._shown = shown.display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)


def new_frame(purpose: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a DataFrame of pandas with a row for each mapping.

    Args:
        purpose: What needs it, for the error.
        rows: The values by the names of the columns.

    Raises:
        MissingDependencyError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingDependencyError("pandas", "pandas", purpose) from None
    return pandas.DataFrame(rows)


def new_figure(purpose: str, **options: Any) -> NotebookFigure:
    """Return an empty figure of matplotlib, which a notebook shows whether or not it uses pyplot.

    Args:
        purpose: What needs it, for the error.
        **options: Of the figure, such as its size in inches.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from drivetrain.core.notebook.figure import NotebookFigure
    except ImportError:
        raise MissingDependencyError("matplotlib", "plots", purpose) from None
    return NotebookFigure(layout="constrained", **options)
