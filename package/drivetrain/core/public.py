"""The public names of the packages that load them lazily."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

HOMES: dict[str, Mapping[str, str]] = {}
"""For each package that loads its names lazily, the module that defines each name."""


def package_with(name: str) -> str:
    """Return the package below `drivetrain` that has a public name; empty if none has."""
    root = importlib.import_module("drivetrain")
    for package in pkgutil.iter_modules(root.__path__, "drivetrain."):
        if package.ispkg:
            importlib.import_module(package.name)
            if name in HOMES.get(package.name, ()):
                return package.name
    return ""
