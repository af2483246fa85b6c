"""A griffe extension: docstrings as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Literal(griffe.Extension):
    """Turns reStructuredText's literal blocks, an indented text after "::", into code blocks of Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite an object's docstring."""
        if obj.docstring:
            text = re.sub(r"(?m)^ *::\n", "", obj.docstring.value)
            obj.docstring.value = re.sub(r"(?m)::$", ":", text)
