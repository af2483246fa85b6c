"""Packages that load their names on first use (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any

from drivetrain.core.public import HOMES, package_with


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that loads each name on first use (PEP 562).

    The names are those of the stub `__init__.pyi` beside the package's `__init__.py`. Type checkers read the
    stub instead: `from module import Name as Name`.
    """
    module: Any = sys.modules[package]
    stub = module.__loader__.get_data(f"{module.__file__.removesuffix('c')}i")  # from an archive too
    lines = (each for each in ast.parse(stub).body if isinstance(each, ast.ImportFrom))
    module_of = HOMES[package] = {alias.name: str(each.module) for each in lines for alias in each.names}

    def get(name: str) -> Any:
        if name not in module_of:
            # Not imported above: importing the package alone must stay cheap.
            synonyms = importlib.import_module("drivetrain.core.synonyms")
            home = package_with(name)
            told = f"It is {home}.{name}" if home else synonyms.help_with(name, module_of, "name")
            told = f"{package} has no {name!r}. {told}"
            # `from drivetrain import X` replaces an AttributeError by an error without our hint.
            is_known = home or synonyms.row(name, "name")
            if sys._getframe(1).f_code.co_name == "_handle_fromlist" and is_known:
                raise ImportError(told)
            raise AttributeError(told)
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(importlib.import_module(package), name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *module_of})

    return get, names, sorted(module_of)
