"""From the names of weights elsewhere to the names that a module has for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias, TypeVar

from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.module_state import clean_name, clean_names

T = TypeVar("T")

Rename: TypeAlias = Mapping[str, str | None] | Callable[[str], str | None]
"""How names there become names here: regular expressions with replacements, or a function; None drops."""

_COMMON = 8
"""An end that more names than this have, such as "weight", tells nothing about their beginnings."""


def renamed(given: Mapping[str, T], rename: Rename | None, where: str) -> tuple[dict[str, T], list[str]]:
    """Tensors, or anything else, by the names that they are to have here; and the names that were dropped.

    Args:
        given: By the names there; what wrapping adds is taken off before `rename` sees them.
        rename: See `Rename`; each pattern is applied, with `re.sub`, to what those before it made.
        where: Where they come from, for messages.

    Raises:
        CheckpointError: Two names become one.
        ConfigError: `rename` is no such thing, or cannot be applied.
    """
    new_name = _renaming(rename)
    origins: dict[str, str] = {}
    dropped: list[str] = []
    for clean, old in clean_names(given, where).items():
        new = new_name(clean)
        if new is None:
            dropped.append(old)
            continue
        if not isinstance(new, str):
            raise ConfigError(
                f"rename({clean!r}) gave a {type(new).__name__}; allowed are a name, and None to drop it"
            )
        other = origins.setdefault(clean_name(new), old)
        if other != old:
            raise CheckpointError(
                f"{other!r} and {old!r} of {where} both become {new!r}. Change `rename`, or let it drop one"
            )
    return {new: given[old] for new, old in origins.items()}, dropped


def _renaming(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Mapping):
        return _by_patterns(rename)
    if not callable(rename):
        raise ConfigError(
            "rename must be a mapping of regular expressions to replacements, or a function, not a "
            f"{type(rename).__name__}"
        )
    return rename


def _by_patterns(replacements: Mapping[str, str | None]) -> Callable[[str], str | None]:
    def apply(name: str) -> str | None:
        for pattern, replacement in replacements.items():
            try:
                if replacement is not None:
                    name = re.sub(pattern, replacement, name)
                elif re.search(pattern, name):
                    return None
            except (re.error, TypeError, IndexError) as error:
                raise ConfigError(
                    f"rename has {pattern!r}: {replacement!r}, which cannot be applied: {error}"
                ) from error
        return name

    return apply


def prefix_hint(given: Collection[str], own: Collection[str]) -> str:
    """Suggest a `rename` of the beginnings of names, if most names fit with it.

    Args:
        given: Names there.
        own: Names here.

    Returns:
        A sentence, with a blank behind it; nothing if there is no such beginning.
    """
    heads: dict[str, list[str]] = {}
    for name in own:
        for head, tail in _splits(name):
            heads.setdefault(tail, []).append(head)
    votes: Counter[tuple[str, str]] = Counter()
    for name in given:
        for head, tail in _splits(name):
            here = heads.get(tail, [])
            if len(here) <= _COMMON:
                votes.update((head, other) for other in here)
    if not votes:
        return ""
    # Of those that fit the most names, the shortest.
    (old, new), count = max(votes.items(), key=lambda vote: (vote[1], -len(vote[0][0]) - len(vote[0][1])))
    if old == new or 2 * count <= min(len(given), len(own)) or count < min(2, len(own)):
        return ""
    return f"Most names would fit with rename={{{'^' + re.escape(old)!r}: {new!r}}}. "


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """A name as its beginning and its end, divided before the first part and behind each dot."""
    yield "", name
    for match in re.finditer(r"\.", name):
        yield name[: match.end()], name[match.end() :]
