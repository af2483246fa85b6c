"""Texts from the command line, as the values that a parameter's annotation asks for."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from drivetrain.errors import ConfigError
from drivetrain.peers import help_with

_NONE = ("none", "null")
_TRUE = ("true", "yes", "on")
_FALSE = ("false", "no", "off")
_EMPTY = ("", "()", "[]", "none", "null")
_SEQUENCES = (list, tuple, set, frozenset)
_WORDS = {
    type(None): "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


class NotConvertible(ValueError):  # noqa: N818 - never leaves this module but as a ConfigError
    """A text that is no value of the wanted kind."""


def convert(name: str, given: Any, hint: Any, *, build: bool = True) -> Any:
    """The value of a parameter.

    Args:
        name: What the user wrote it as: "trainer.max_epochs"; stands in the message.
        given: A text, which is converted; a mapping of parts, for a dataclass or a mapping; or another value
            of a JSON file, which is taken as it is.
        hint: The parameter's annotation, resolved; `Any` or nothing guesses as JSON would.
        build: Make the dataclass that a mapping of parts describes; False gives the converted parts, as a
            JSON file would.

    Raises:
        ConfigError: The text is no such value; says what is allowed.
    """
    if isinstance(given, Mapping):
        return _from_parts(name, given, hint, build)
    if not isinstance(given, str):
        return given
    try:
        return _convert(given, hint)
    except NotConvertible:
        raise ConfigError(f"{name} must be {describe(hint)}, not {given!r}") from None


def arguments(
    name: str, function: Callable[..., Any], given: Mapping[str, Any], *, build: bool = True
) -> dict[str, Any]:
    """The keyword arguments for a class or function, each converted by its annotation.

    Args:
        name: The prefix of its options: "task".
        function: What will be called.
        given: Texts, or values of a JSON file, by parameter.
        build: As in `convert`.

    Raises:
        ConfigError: An unknown name (lists the nearest), a missing one, or a value that does not fit.
    """
    parameters = _parameters(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    named = {
        key: each
        for key, each in parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    called = getattr(function, "__name__", type(function).__name__)
    for key in given:
        if key not in named and not takes_any:
            elsewhere = getattr(function, "_elsewhere", {})
            raise ConfigError(f"{called} has no parameter {key!r}. {help_with(key, named, elsewhere)}")
    missing = [key for key, each in named.items() if each.default is each.empty and key not in given]
    if missing:
        raise ConfigError(
            f"{called} needs a value for {', '.join(missing)}: give --{name}.{missing[0]} VALUE"
        )
    hints = _hints(function)
    return {
        key: convert(f"{name}.{key}", value, hints.get(key, _hint_of_default(named.get(key))), build=build)
        for key, value in given.items()
    }


def describe(hint: Any) -> str:
    """What an annotation allows, in words."""
    members = get_args(hint) if _is_union(hint) else (hint,)
    words: list[str] = []
    for each in members:
        if get_origin(each) is Literal:
            words += [repr(value) for value in get_args(each)]
        elif _element(each) is not None:
            words.append("a list (a,b,c)")
        elif _is_mapping(each):
            words.append("a JSON object")
        elif each in _WORDS:
            words.append(_WORDS[each])
    unique = list(dict.fromkeys(words))
    return (
        ", ".join(unique[:-1]) + " or " + unique[-1] if len(unique) > 1 else (unique or ["another value"])[0]
    )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it must judge for itself
        return inspect.signature(lambda **anything: anything).parameters


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    owner: Any = function
    if isinstance(function, type) and not dataclasses.is_dataclass(function):
        owner = vars(function).get("__init__") or getattr(function, "__init__")  # noqa: B009
    try:
        return get_type_hints(owner)
    except Exception:  # names that exist for type checkers only: without hints, values are guessed
        return {}


def _hint_of_default(parameter: inspect.Parameter | None) -> Any:
    default = None if parameter is None else parameter.default
    return type(default) if isinstance(default, (bool, int, float, str)) else Any


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_mapping(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _element(hint: Any) -> Any:
    """What a sequence's annotation says of its elements; None when it is no sequence."""
    kind = get_origin(hint) or hint
    if kind in _SEQUENCES or (
        isinstance(kind, type) and kind not in (str, bytes) and issubclass(kind, Sequence)
    ):
        return (*get_args(hint), Any)[0]
    return None


def _convert(text: str, hint: Any) -> Any:
    if _is_union(hint):
        return _to_union(text, get_args(hint))
    if get_origin(hint) is Literal:
        for value in get_args(hint):
            if str(value) == text:
                return value
        raise NotConvertible
    if _element(hint) is not None:
        return _to_sequence(text, hint)
    if _is_mapping(hint):
        return _from_json(text, dict)
    converters: dict[Any, Callable[[str], Any]] = {
        type(None): _to_none,
        bool: _to_bool,
        int: _to_int,
        float: _to_float,
        str: str,
        Path: Path,
    }
    if hint in converters:
        return converters[hint](text)
    if hint is Any or hint is inspect.Parameter.empty:
        return _guess(text)
    raise NotConvertible


def _to_union(text: str, members: Sequence[Any]) -> Any:
    """The first member that takes the text, from the narrowest to `str`, which takes all."""
    lists = [each for each in members if _element(each) is not None]
    if lists and ("," in text or text[:1] in "[(" or (text in _EMPTY and type(None) not in members)):
        return _to_sequence(text, lists[0])
    narrow = [each for each in (type(None), bool, int, float) if each in members]
    others = [each for each in members if each not in narrow and each is not str and each not in lists]
    for each in [*narrow, *others, *([str] if str in members else []), *lists]:
        try:
            return _convert(text, each)
        except NotConvertible:
            continue
    raise NotConvertible


def _to_sequence(text: str, hint: Any) -> Any:
    if text.strip().lower() in _EMPTY:
        items: list[Any] = []
    elif text.startswith("[") and text.endswith("]"):
        items = _from_json(text, list)
    else:
        items = [part.strip() for part in text.strip("()").split(",") if part.strip()]
    args = get_args(hint)
    kinds = (
        args
        if args and Ellipsis not in args and get_origin(hint) is tuple
        else (_element(hint),) * len(items)
    )
    if len(kinds) != len(items):
        raise NotConvertible
    values = [
        _convert(each, kind) if isinstance(each, str) else each
        for each, kind in zip(items, kinds, strict=True)
    ]
    kind = get_origin(hint) or hint
    return kind(values) if kind in _SEQUENCES else tuple(values)


def _from_json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        raise NotConvertible from None
    if not isinstance(value, kind):
        raise NotConvertible
    return value


def _to_none(text: str) -> None:
    if text.lower() not in _NONE:
        raise NotConvertible


def _to_bool(text: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise NotConvertible


def _to_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise NotConvertible from None


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise NotConvertible from None


def _guess(text: str) -> Any:
    for converter in (_to_none, _to_bool, _to_int, _to_float):
        try:
            return converter(text)
        except NotConvertible:
            continue
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _from_parts(name: str, parts: Mapping[str, Any], hint: Any, build: bool) -> Any:
    """A dataclass from its fields, or a mapping, whichever the annotation has."""
    members = get_args(hint) if _is_union(hint) else (hint,)
    for each in members:
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            values = arguments(name, each, parts, build=build)
            return each(**values) if build else values
    if hint is Any or any(_is_mapping(each) for each in members):
        return {key: convert(f"{name}.{key}", value, Any) for key, value in parts.items()}
    raise ConfigError(
        f"{name} has no parts such as {name}.{next(iter(parts), 'x')}; it must be {describe(hint)}"
    )
