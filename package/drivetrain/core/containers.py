"""Nested values: take a container apart one level at a time, and rebuild it with the same type."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree

_LEAVES = (Tensor, str, bytes, int, float, complex, type(None))


class Container(NamedTuple):
    """One level of a nested value.

    Attributes:
        names: The entries' names: keys, field names, or positions.
        entries: The entries.
        rebuild: Makes a container of the same type from other entries.
    """

    names: Sequence[Any]
    entries: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def opened(value: Any) -> Container | None:
    """Return one level of a container, or None for a leaf, such as a tensor, a number or an unknown object.

    Containers are mappings, lists, tuples, dataclasses, and every type that is registered with torch's
    pytree, such as outputs of models of other libraries. `rebuild` keeps the container's type, and its
    field names, attributes and default factory.
    """
    if isinstance(value, _LEAVES):
        return None
    if type(value) is list or type(value) is tuple:  # the usual ones, without torch's registry
        return Container(range(len(value)), list(value), type(value))
    if type(value) is dict:
        keys: Sequence[Any] = list(value)
        return Container(keys, list(value.values()), lambda others: dict(zip(keys, others, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return Container(getattr(value, "_fields", range(len(value))), list(value), value._make)
    return _opened_by_kind(value)


def _opened_by_kind(value: Any) -> Container | None:
    """Return one level of a dataclass, of a type of torch's pytree, or of another mapping or sequence."""
    is_mapping = isinstance(value, Mapping)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_mapping:
        names = [field.name for field in dataclasses.fields(value)]
        entries = [getattr(value, name) for name in names]
        return Container(names, entries, lambda others: _dataclass_like(value, names, others))
    entries, structure = _pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if not (len(entries) == 1 and entries[0] is value):
        keys: Sequence[Any] = list(value.keys()) if is_mapping else ()
        keys = keys if len(keys) == len(entries) else range(len(entries))
        return Container(keys, entries, lambda others: _pytree.tree_unflatten(others, structure))
    if isinstance(value, (tuple, list)):
        return Container(range(len(value)), list(value), lambda others: _sequence_like(value, others))
    if is_mapping:
        keys = list(value)
        return Container(
            keys, [value[key] for key in keys], lambda others: _mapping_like(value, keys, others)
        )
    return None


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in a nested value and is no container, in order."""
    if (container := opened(value)) is None:
        yield value
    else:
        for each in container.entries:
            yield from leaves(each)


def _sequence_like(original: Any, entries: Sequence[Any]) -> Any:
    if isinstance(original, list):
        copied = copy.copy(original)
        copied[:] = entries
        return copied
    try:
        made: Any = tuple.__new__(type(original), entries)
    except TypeError:  # a type of torch, such as torch.Size
        return type(original)(entries)
    if hasattr(original, "__dict__"):
        made.__dict__.update(vars(original))
    return made


def _mapping_like(
    original: Mapping[Any, Any], keys: Sequence[Any], entries: Sequence[Any]
) -> Mapping[Any, Any]:
    values = dict(zip(keys, entries, strict=True))
    if isinstance(original, (dict, UserDict)):  # a copy keeps a default factory, attributes and the order
        copied = copy.copy(original)
        for key, value in values.items():  # not `update`, which some types forbid
            copied[key] = value
        return copied
    try:
        made: Mapping[Any, Any] = type(original)(values)  # type: ignore[call-arg]
    except TypeError:  # its constructor takes something else; a step can read a dict by key too
        return values
    return made


def _dataclass_like(original: Any, names: Sequence[str], entries: Sequence[Any]) -> Any:
    # Not dataclasses.replace: it runs the constructor, which may convert values or require more arguments.
    clone = copy.copy(original)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(clone, name, entry)  # also on a frozen one
    return clone
