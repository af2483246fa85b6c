"""A package whose names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def exports(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__` (PEP 562), by which each name is loaded when it is first used.

    Args:
        package: Its `__name__`.
        homes: The names that it exports, by the module that has them.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            # Not imported above: importing the package alone is to bring in next to nothing.
            synonyms = importlib.import_module("drivetrain.synonyms")
            told = f"{package} has no {name!r}. {synonyms.help_with(name, module_of, 'name')}"
            # `from drivetrain import X` would put an error that says nothing in place of an AttributeError.
            if sys._getframe(1).f_code.co_name == "_handle_fromlist" and synonyms.row(name, "name"):
                raise ImportError(told)
            raise AttributeError(told)
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(importlib.import_module(package), name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of})

    return get, names
