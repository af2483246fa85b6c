"""Rename weights from another source to the names in a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

from drivetrain.checkpoint.weights.module_state import clean_name, clean_names
from drivetrain.core.errors import CheckpointError, ConfigError

T = TypeVar("T")

Rename: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""The rule from source names to module names: regular expressions with replacements, or a function. None
drops a tensor."""


def renamed(given: Mapping[str, T], rename: Rename | None, where: str) -> tuple[dict[str, T], list[str]]:
    """Return tensors, or other values, by their new names, and the names that were dropped.

    Args:
        given: The values by source name; `rename` gets the names without the parts that wrappers add.
        rename: See `Rename`; each pattern is applied with `re.sub` to the result of those before it.
        where: The source, for messages.

    Raises:
        CheckpointError: Two names become one.
        ConfigError: `rename` has a wrong type, or cannot be applied.
    """
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise ConfigError(
            "rename must be a mapping of regular expressions to replacements, or a function, not a "
            f"{type(rename).__name__}"
        )
    origins: dict[str, str] = {}
    dropped: list[str] = []
    for clean, old in clean_names(given, where).items():
        if isinstance(rename, Mapping):
            new = _replaced(clean, rename)
        else:
            new = clean if rename is None else rename(clean)
        if new is None:
            dropped.append(old)
            continue
        if not isinstance(new, str):
            raise ConfigError(
                f"rename({clean!r}) gave a {type(new).__name__}; return a name, or None to drop it"
            )
        other = origins.setdefault(clean_name(new), old)
        if other != old:
            raise CheckpointError(f"{other!r} and {old!r} of {where} become {new!r}. Let `rename` drop one")
    return {new: given[old] for new, old in origins.items()}, dropped


def _replaced(name: str, replacements: Mapping[str, str | None]) -> str | None:
    for pattern, replacement in replacements.items():
        try:
            if replacement is not None:
                name = re.sub(pattern, replacement, name)
            elif re.search(pattern, name):
                return None
        except (re.error, TypeError, IndexError) as error:
            raise ConfigError(f"rename has {pattern!r}: {replacement!r}, which fails: {error}") from error
    return name
