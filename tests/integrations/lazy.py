"""Modules that are imported when they are first used, so that collecting these tests loads none of them."""

import importlib
from typing import Any


class Lazy:  # a module by its name; reading a name of it imports it
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
