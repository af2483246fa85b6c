"""Checks of a user's configuration: numbers, words, and names of arguments."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.files import check_path
from drivetrain.core.intervals import Every
from drivetrain.core.synonyms import foreign, help_with

T = TypeVar("T", bound=Callable[..., Any])


def by_name(target: T) -> T:
    """Decorate a class or a method: unknown arguments raise an error that names the right ones.

    If all arguments are keyword-only, an argument given by position raises an error with an example.
    """
    if isinstance(target, type):
        target.__init__ = by_name(target.__init__)  # type: ignore[misc]
        return target
    known = dict(list(inspect.signature(target).parameters.items())[1:])
    all_by_name = all(each.kind is each.KEYWORD_ONLY for each in known.values())

    @functools.wraps(target)
    def checked(self: Any, *positional: Any, **given: Any) -> Any:
        owner = type(self).__name__
        if target.__name__ != "__init__":
            owner = f"{owner}.{target.__name__}"
        if positional and all_by_name:
            theirs = next((told for each in positional if (told := foreign(each))), None)
            raise ConfigError(
                f"{owner} takes its arguments by name, as in {owner}({next(iter(known))}=...), not"
                f" {theirs or repr(positional[0])}"
            )
        check_names(owner, given, known, what="argument")
        return target(self, *positional, **given)

    return cast(T, checked)


def check_no_class(name: str, *values: object) -> None:
    """Check that no value is a class where an object is wanted."""
    for each in values:
        if isinstance(each, type):
            raise ConfigError(
                f"{name} has the class {each.__name__}, where an object is wanted: write"
                f" {each.__name__}(...), with its parentheses"
            )


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Check that a value is a finite number within bounds, and return it as a float."""
    bounds: tuple[tuple[str, float | None, Callable[[float, float], bool]], ...] = (
        ("above", above, lambda given, bound: given > bound),
        ("at least", at_least, lambda given, bound: given >= bound),
        ("below", below, lambda given, bound: given < bound),
        ("at most", at_most, lambda given, bound: given <= bound),
    )
    wanted = " and ".join(f"{words} {bound:g}" for words, bound, _ in bounds if bound is not None)
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        given = float(value)
        if math.isfinite(given) and all(bound is None or within(given, bound) for _, bound, within in bounds):
            return given
    raise ConfigError(f"{name} must be a finite number{' ' if wanted else ''}{wanted}, not {value!r}")


def duration(name: str, value: str | float | timedelta | None) -> float | None:
    """Return a time in seconds, or None for None."""
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return None if value is None else number(f"{name} (in seconds)", value, above=0)
    try:
        found = Every(value).seconds
    except ConfigError:  # its message is about intervals of steps too
        found = None
    if found is None:
        raise ConfigError(
            f"{name} must be a positive time, not {value!r}: a number of seconds, a timedelta, or a text in"
            " seconds, minutes or hours, such as '2 hours'. Steps and epochs are limited by max_steps and"
            " max_epochs"
        )
    return found


def token_count(name: str, value: Any) -> int:
    """Check that a value is a number of tokens, or a text such as "10M tokens", and return it."""
    if not isinstance(value, (str, Every)):
        return count(name, value, at_least=1)
    every = Every(value)
    if every.unit != "tokens":
        raise ConfigError(f"{name} takes a number of tokens, such as '10M tokens', not {value!r}")
    return int(every.amount)


def count(name: str, value: object, *, at_least: int = 0) -> int:
    """Check that a value is a whole number, and return it as an int."""
    if not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= at_least:
        return int(value)
    raise ConfigError(f"{name} must be a whole number, at least {at_least}, not {value!r}")


def byte_count(name: str, value: object) -> int:
    """Check that a value is a number of bytes, or a text such as "5 GB" or "1.5 GiB", and return it."""
    size = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", value, re.IGNORECASE)
        if found:
            power = " kmgt".index((found[2] or " ").lower())
            size = math.floor(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size > 0:
        return size
    raise ConfigError(f"{name} must be a number of bytes above 0, or a text such as '5 GB', not {value!r}")


def flag(name: str, value: object) -> bool:
    """Check that a value is True or False, and return it. The text "no", which is truthy, raises."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name} must be True or False, not {value!r}")


def globs(name: str, value: object, *, at_least: int = 1) -> tuple[str, ...] | None:
    """Check that a value is a glob, such as "blocks.*", or a sequence of globs; None stays None."""
    if value is None:
        return None
    given = (value,) if isinstance(value, str) else value
    if (
        isinstance(given, (list, tuple))
        and len(given) >= at_least
        and all(isinstance(each, str) and each for each in given)
    ):
        return tuple(given)
    raise ConfigError(f"{name} must be a glob such as 'blocks.*', or a sequence of globs, not {value!r}")


def local_path(name: str, value: object) -> Path:
    """Check that a value is a path on a local disk, and return it."""
    if isinstance(value, (str, os.PathLike)) and value and "://" not in os.fspath(value):
        check_path(value)
        return Path(value)
    raise ConfigError(f"{name} must be a path on a local disk, such as 'results', not {value!r}")


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    """Check that a value is one of the allowed words, and return it."""
    if isinstance(value, str) and value in allowed:
        return value
    raise ConfigError(f"unknown {name} {value!r}. {nearest(str(value), allowed)}")


def keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keywords that `function`, or a class's constructor, takes; None if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable written in C may have no signature: it checks them itself
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def check_names(
    owner: str, given: Iterable[str], allowed: Collection[str] | None, what: str = "option"
) -> None:
    """Check that `owner` takes all given names; report all unknown ones in one error.

    Args:
        allowed: The allowed names; None allows any.
    """
    wrong = [] if allowed is None else [name for name in given if name not in allowed]
    if not wrong:
        return
    helped = [help_with(name, allowed or (), owner=owner) for name in wrong]
    if len(wrong) == 1:
        raise ConfigError(f"{owner} has no {what} {wrong[0]!r}. {helped[0]}")
    lines = [f"\n- {name!r}. {hint.split('Allowed: ')[0]}" for name, hint in zip(wrong, helped, strict=True)]
    raise ConfigError(f"{owner} has no {what}s{''.join(lines)}\nAllowed: {helped[0].split('Allowed: ')[1]}")
