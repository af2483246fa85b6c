"""The public classes, loaded for messages that look for an argument in all of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

HOMES: dict[str, Mapping[str, Sequence[str]]] = {}
"""The exported names of each package that loads them lazily, by the module that defines them."""


def public_classes(package: str = "drivetrain") -> list[type]:
    """Load and return the public classes of a package."""
    homes = HOMES.get(package, {})
    found = [getattr(importlib.import_module(home), name) for home, names in homes.items() for name in names]
    return [each for each in found if isinstance(each, type)]
