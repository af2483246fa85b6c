"""The public classes, loaded for messages that look for an argument in all of them."""

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


def public_classes(package: str = "drivetrain") -> list[type]:
    """Load and return the public classes of a package, and of the loaded packages below it."""
    below = [known for name, known in HOMES.items() if name.startswith(f"{package}.")]
    homes = {name: home for known in (*below, HOMES.get(package, {})) for name, home in known.items()}
    found = [getattr(importlib.import_module(home), name) for name, home in homes.items()]
    return [each for each in found if isinstance(each, type)]
