"""Packages that load their names on first use (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drivetrain.core.public import HOMES


def exports(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that loads each name on first use (PEP 562).

    Args:
        package: The package's `__name__`.
        homes: The exported names, by the module that defines them.
    """
    HOMES[package] = homes
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            # Not imported above: importing the package alone must stay cheap.
            synonyms = importlib.import_module("drivetrain.core.synonyms")
            told = f"{package} has no {name!r}. {synonyms.help_with(name, module_of, 'name')}"
            # `from drivetrain import X` replaces an AttributeError by an error without our hint.
            if sys._getframe(1).f_code.co_name == "_handle_fromlist" and synonyms.row(name, "name"):
                raise ImportError(told)
            raise AttributeError(told)
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(importlib.import_module(package), name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of})

    return get, names
