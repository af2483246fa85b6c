"""Checks of what a user writes in a configuration: numbers, and the options of other functions."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

from drivetrain.errors import ConfigError, nearest
from drivetrain.synonyms import foreign, help_with
from drivetrain.types import Every

T = TypeVar("T", bound=Callable[..., Any])


def by_name(target: T) -> T:
    """Decorate a class or a method: it refuses unknown arguments, each with the name to use.

    Where all arguments are keyword-only, an argument given by position is refused with an example.
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


def number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """A finite number within bounds, as a float.

    Args:
        name: How the user knows the value; stands in the message.
        value: What was given; a bool is not a number.
        above: The value must be greater.
        at_least: The value must be this or greater.
        below: The value must be less.
        at_most: The value must be this or less.

    Raises:
        ConfigError: `value` is no finite number, or out of bounds.
    """
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
    """A time in seconds; None is none.

    Raises:
        ConfigError: `value` is no number of seconds above 0, no `timedelta`, and no text such as "2 hours".
    """
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        return None if value is None else number(f"{name} (in seconds)", value, above=0)
    found = Every(value).seconds
    if found is None:
        raise ConfigError(
            f"{name}={value!r} is no time; give seconds, a timedelta, or a text such as '2 hours'"
        )
    return found


def count(name: str, value: object, *, at_least: int = 0) -> int:
    """A whole number, as an int.

    Raises:
        ConfigError: `value` is not whole (a bool or a float is not), or less than `at_least`.
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= at_least:
        return int(value)
    raise ConfigError(f"{name} must be a whole number, at least {at_least}, not {value!r}")


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that merely counts as one of them (the text "no" counts as true).

    Raises:
        ConfigError: `value` is no bool.
    """
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name} must be True or False, not {value!r}")


def one_of(name: str, value: object, allowed: Collection[str]) -> str:
    """One of a few words.

    Raises:
        ConfigError: `value` is none of them; names the nearest.
    """
    if isinstance(value, str) and value in allowed:
        return value
    raise ConfigError(f"unknown {name} {value!r}. {nearest(str(value), allowed)}")


def keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names that `function` (or a class's constructor) takes as keywords; None when it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable written in C may have no signature: it must judge for itself
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def check_names(
    owner: str, given: Iterable[str], allowed: Collection[str] | None, what: str = "option"
) -> None:
    """Refuse names that `owner` does not take, all in one error.

    Args:
        owner: Who takes them, as the user knows it: "Trainer", "the optimizer 'sgd'".
        given: The names.
        allowed: The names it takes, or None for any.
        what: What the message calls them.

    Raises:
        ConfigError: One is unknown; names ours or the nearest for each, and all that are allowed.
    """
    wrong = [] if allowed is None else [name for name in given if name not in allowed]
    if not wrong:
        return
    helped = [help_with(name, allowed or (), owner=owner) for name in wrong]
    if len(wrong) == 1:
        raise ConfigError(f"{owner} has no {what} {wrong[0]!r}. {helped[0]}")
    lines = [f"\n- {name!r}. {hint.split('Allowed: ')[0]}" for name, hint in zip(wrong, helped, strict=True)]
    raise ConfigError(f"{owner} has no {what}s{''.join(lines)}\nAllowed: {helped[0].split('Allowed: ')[1]}")
