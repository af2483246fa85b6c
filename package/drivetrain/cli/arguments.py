"""The parser of a class's arguments: it takes from a default what the annotation does not say."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from drivetrain.cli.settings_tree import AddedItems, ChangedEntries, read_value
from drivetrain.core.errors import ConfigError

_LISTS = (list, tuple, set, frozenset)


class Arguments(ArgumentParser):
    """A parser in which defaults give types, and can be added to."""

    def add_class_arguments(self, *args: Any, **options: Any) -> Any:
        added = super().add_class_arguments(*args, **options)
        self.take_types_of_defaults()
        return added

    def take_types_of_defaults(self) -> None:
        """Give types to arguments without an annotation, and to the items of lists and mappings."""
        for action in self._typed():
            action._typehint = _with_items(action._typehint, action.default)

    def parse_object(self, given: Any, *args: Any, **options: Any) -> Any:
        for action in self._typed():
            *above, last = action.dest.split(".")
            node = given
            for name in above:
                node = node.get(name, {}) if isinstance(node, (dict, Namespace)) else {}
            if isinstance(node, ChangedEntries) and above[0] != "trainer" and action.default != SUPPRESS:
                node.setdefault(last, action.default)  # the other fields of a default that is changed
            if isinstance(node, (dict, Namespace)) and last in node:
                try:
                    node[last] = _fitting(node[last], action._typehint, action.default)
                except yaml.YAMLError:
                    raise ConfigError(
                        f"--{action.dest} is not valid YAML, though it begins with a bracket: {node[last]!r}"
                    ) from None
        return super().parse_object(given, *args, **options)

    def _typed(self) -> list[Any]:
        return [each for each in self._actions if hasattr(each, "_typehint")]


def _with_items(hint: Any, default: Any) -> Any:
    """Return a type in which the items of lists and mappings have types: those of a default's, or any."""
    members = _members(hint)
    untyped = any(map(_is_untyped, members))
    if untyped and isinstance(default, str):
        return str | None  # among others, a text such as "a,b" would be read as a list
    known = [
        _type_of(default if isinstance(default, each) else each()) if each in (*_LISTS, dict) else each
        for each in members
    ]
    return _any_of([*known, *([list[Any]] if untyped else [])])


def _type_of(value: Any) -> Any:
    kind: Any = next((each for each in (*_LISTS, dict) if isinstance(value, each)), None)
    if kind is not None:
        items = _any_of([_type_of(each) for each in (value.values() if kind is dict else value)])
        if kind is dict:
            return kind[int if value and all(type(each) is int for each in value) else str, items]
        return kind[items, ...] if kind is tuple else kind[items]
    return str if isinstance(value, str) else type(value) | Any if type(value) in (bool, int, float) else Any


def _fitting(value: Any, hint: Any, default: Any) -> Any:
    """Return a given value: with the default that it adds to, and a text as a list where one is wanted."""
    if isinstance(value, AddedItems):
        value = [*(default if isinstance(default, _LISTS) else ()), *value]
    if isinstance(value, ChangedEntries) and any(map(_is_untyped, _members(hint))):
        value = _typed(value)
    value = _merged(default, value)
    if isinstance(value, str) and value[:1] in ("[", "{") and _takes_texts(hint):
        value = read_value(value, yaml.BaseLoader)  # [1,2] is the same as 1,2
    if isinstance(value, str):
        value = _listed(value, [get_origin(each) or each for each in _members(hint)], default)
    return _known(value) if _scalars(hint) <= {bool, int, float, NoneType} else value


def _listed(text: str, kinds: list[Any], default: Any) -> Any:
    """Return a text as a list, of one item too, if these types have a list; else the text."""
    if not any(_is_container(each) and not issubclass(each, Mapping) for each in kinds):
        return text
    others = [each for each in kinds if not (_is_container(each) or each is NoneType)]
    is_list = all(_is_untyped(each) and isinstance(default, _LISTS) for each in others)
    found = read_value(text)
    if isinstance(found, list) and (found or is_list):
        return found
    return [text] if is_list and isinstance(found, (str, float, bool)) else text


def _typed(value: Any) -> Any:
    """Return entries without an annotation as numbers, truth values and the like, where texts are such."""
    if isinstance(value, ChangedEntries):
        return ChangedEntries({name: _typed(each) for name, each in value.items()})
    found = read_value(value) if isinstance(value, str) else value
    for kind in (int, float) if isinstance(found, str) else ():
        with suppress(ValueError):
            return kind(found)
    return found


def _merged(default: Any, value: Any) -> Any:
    if not isinstance(value, ChangedEntries):
        return value
    before = default if isinstance(default, Mapping) else {}
    return {**before, **{name: _merged(before.get(name), each) for name, each in value.items()}}


def _known(value: Any) -> Any:
    """Return a value with none and infinity for their texts, which jsonargparse does not read everywhere."""
    if isinstance(value, list):
        return [_known(each) for each in value]
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items()}
    found = read_value(value) if isinstance(value, str) else value
    if isinstance(found, dict):  # in braces
        return _known(found)
    return found if found is None or isinstance(found, float) else value


def _scalars(hint: Any) -> set[Any]:
    """Return the types in a type that are no containers, keys left out."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin not in (Union, UnionType) and not _is_container(origin):
        return {hint}
    values = inside[1:] if _is_container(origin) and issubclass(origin, Mapping) else inside
    return {found for each in values if each is not ... for found in _scalars(each)}


def _takes_texts(hint: Any) -> bool:
    """Return whether values of a type are lists or mappings with texts, or none."""
    members = [each for each in _members(hint) if each is not NoneType and not _is_untyped(each)]
    items = {item for each in members for item in _scalars(each)} - {Any}
    return {str} <= items <= {bool, int, float, str} and all(_is_container(get_origin(m)) for m in members)


def _is_container(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Collection) and kind is not str


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _any_of(types: list[Any]) -> Any:
    return Union[(*types,)] if types else Any


def _is_untyped(hint: Any) -> bool:
    return hint is Any or str(hint) == "Untyped"
