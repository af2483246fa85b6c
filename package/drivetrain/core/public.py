"""The public classes, loaded for messages that look for an argument in all of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

HOMES: dict[str, Mapping[str, str]] = {}
"""For each package that loads its names lazily, the module that defines each name."""


def public_classes(package: str = "drivetrain") -> list[type]:
    """Load and return the public classes of a package."""
    homes = HOMES.get(package, {})
    found = [getattr(importlib.import_module(home), name) for name, home in homes.items()]
    return [each for each in found if isinstance(each, type)]
