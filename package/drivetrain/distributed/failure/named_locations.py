"""Names that the layers above give their functions, for reports of where a rank is; `location` reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

names: dict[CodeType, str] = {}
"""Functions by their code, and the words for a rank that is in one."""

waits: dict[CodeType, str] = {}
"""Functions that wait for a thread, by their code, and the thread's name."""

hooks: set[str] = set()
"""Names of callbacks' hooks."""

callers: set[CodeType] = set()
"""Functions that call hooks, by their code."""

opaque: list[str] = []
"""Files, and folders with a separator at the end, whose code shows no progress until it is done."""


def named_location(words: str) -> Callable[[F], F]:
    """Decorate a function with the words for a rank that is in it, such as "in the backward"."""
    return lambda function: _mark(names, function, words)


def waits_for_thread(name: str) -> Callable[[F], F]:
    """Decorate a function that waits for a thread, by the thread's name; that thread is then looked at."""
    return lambda function: _mark(waits, function, name)


def calls_hooks(function: F) -> F:
    """Decorate a function that calls hooks; a hook that a save calls is no part of the save."""
    callers.add(function.__code__)
    return function


def register_hooks(found: Iterable[str]) -> None:
    hooks.update(found)


def register_opaque(path: str) -> None:
    """Add a file whose code shows no progress until it is done; an ``__init__.py`` adds its package."""
    folder, name = os.path.split(path)
    opaque.append(os.path.join(folder, "") if name == "__init__.py" else path)


def _mark(table: dict[CodeType, str], function: F, words: str) -> F:
    table[function.__code__] = words
    return function
