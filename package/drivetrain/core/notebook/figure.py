"""A figure of matplotlib that a notebook shows without pyplot."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

_SHARPNESS = 2
"""Pixels of the picture in one of the page, as on most of today's screens."""


class NotebookFigure(Figure):
    """A figure that IPython shows as a picture; once pyplot is in use, IPython shows all figures itself."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100 * _SHARPNESS)
        width, height = (round(100 * float(each)) for each in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}
