"""Checks of what a user writes in a configuration: numbers, and the options of other functions."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar, Self, TypeVar, cast

from drivetrain.errors import ConfigError, nearest
from drivetrain.peers import help_with
from drivetrain.types import Every

F = TypeVar("F", bound=Callable[..., Any])


class _OwnSignature:
    """What help and editors show of a class: its constructor's signature, and not that of `__new__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class ByName:
    """A class that refuses unknown arguments with the nearest name, which its own constructor would not
    give.
    """

    __signature__ = _OwnSignature()

    _elsewhere: ClassVar[Mapping[str, str]] = {}
    """What other libraries call its arguments."""

    def __new__(cls, *positional: Any, **arguments: Any) -> Self:
        """Look at the names alone.

        Raises:
            ConfigError: An unknown argument, or one without a name where all have one.
        """
        known = _arguments_of(cls.__init__)
        if positional and all(each.kind is each.KEYWORD_ONLY for each in known.values()):
            raise ConfigError(
                f"{cls.__name__} takes its arguments by name, as in {cls.__name__}({next(iter(known))}=...),"
                f" not {positional[0]!r}"
            )
        _check_arguments(cls.__name__, arguments, known, cls._elsewhere)
        return super().__new__(cls)


def by_name(elsewhere: Mapping[str, str]) -> Callable[[F], F]:
    """Have a method refuse unknown arguments with the nearest name.

    Args:
        elsewhere: What other libraries call its arguments.
    """

    def decorate(method: F) -> F:
        known = _arguments_of(method)

        @functools.wraps(method)
        def checked(self: Any, *positional: Any, **arguments: Any) -> Any:
            _check_arguments(f"{type(self).__name__}.{method.__name__}", arguments, known, elsewhere)
            return method(self, *positional, **arguments)

        return cast(F, checked)

    return decorate


def _arguments_of(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters behind `self`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return {each.name: each for each in parameters}


def _check_arguments(
    owner: str,
    given: Iterable[str],
    known: Mapping[str, inspect.Parameter],
    elsewhere: Mapping[str, str],
) -> None:
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    for name in given:
        if name not in known:
            raise ConfigError(f"{owner} has no argument {name!r}. {help_with(name, known, elsewhere)}")


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
    owner: str,
    given: Iterable[str],
    allowed: Collection[str] | None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse options that `owner` does not take.

    Args:
        owner: Who takes the options, as the user knows it: "the optimizer 'sgd'".
        given: The options' names.
        allowed: The names it takes, or None for any.
        elsewhere: What other libraries call them.

    Raises:
        ConfigError: One is unknown; names the nearest and all.
    """
    if allowed is None:
        return
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{owner} has no option {name!r}. {help_with(name, allowed, elsewhere)}")
