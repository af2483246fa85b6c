"""Dataclasses as JSON by their fields, and back.

Which class is made again is for the code to say, in the annotation of a parameter or a field. The class's
name is stored too, but only compared: nothing is imported by a name out of a file.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from drivetrain.checkpoint.tree import pack, unpack
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.types import Json

T = TypeVar("T")


def pack_values(
    given: Mapping[str, Any], annotations: Mapping[str, Any], namespace: Mapping[str, Any]
) -> tuple[dict[str, Json], dict[str, Any]]:
    """Named values, dataclasses among them, as JSON.

    Args:
        given: The values.
        annotations: What the code says of their types: a type, or a text.
        namespace: Where such a text is looked up.

    Returns:
        "values" by name, in the form of `checkpoint.pack`, and where there are any "dataclasses" by name,
        each with its "class" and the same again; and those of the given values that cannot be stored.
    """
    values: dict[str, Json] = {}
    made: dict[str, Json] = {}
    refused: dict[str, Any] = {}
    for name, value in given.items():
        try:
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                made[name] = _pack_dataclass(name, value, _allowed(annotations.get(name), namespace))
            else:
                values[name] = _pack_plain(name, value)
        except CheckpointError:
            refused[name] = value
    return {"values": values, **({"dataclasses": made} if made else {})}, refused


def _pack_plain(name: str, value: Any) -> Json:
    packed, tensors = pack(value)
    if tensors:
        raise CheckpointError(f"{name!r} holds tensors, which are no JSON")
    return packed


def _pack_dataclass(name: str, value: Any, allowed: Collection[type]) -> Json:
    """A dataclass by its fields.

    Raises:
        CheckpointError: It could not be made again from them.
    """
    kind = type(value)
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(kind) if each.init}
    packed, refused = pack_values(fields, _field_annotations(kind), _namespace(kind))
    if kind not in allowed or refused or set(inspect.signature(kind).parameters) != set(fields):
        raise CheckpointError(f"{name!r} is a {kind.__name__}, which its stored fields could not make again")
    return {"class": kind.__name__, **packed}


def dataclass_of(stored: Json, annotation: Any, namespace: Mapping[str, Any]) -> type | None:
    """The dataclass that was stored, if an annotation allows it; else None."""
    name = stored.get("class") if isinstance(stored, dict) else None
    return next((kind for kind in _allowed(annotation, namespace) if kind.__name__ == name), None)


def make(kind: type[T], stored: Json, what: str) -> T:
    """A dataclass from its stored fields.

    Args:
        kind: Which, as `dataclass_of` found it.
        stored: As `pack_values` gave it.
        what: What to call it in a message.

    Raises:
        CheckpointError: It is not what `pack_values` gives.
        ConfigError: The dataclass has other fields by now.
    """
    stored = stored if isinstance(stored, dict) else {}
    values, inner = stored.get("values"), stored.get("dataclasses", {})
    if not isinstance(values, dict) or not isinstance(inner, dict):
        raise CheckpointError(f"{what} is no stored {kind.__name__}")
    fields = {name: unpack(value, {}) for name, value in values.items()}
    annotations = _field_annotations(kind)
    for name, value in inner.items():
        inner_kind = dataclass_of(value, annotations.get(name), _namespace(kind))
        if inner_kind is None:
            raise ConfigError(
                f"{what} has a field {name!r} that {kind.__name__} has no longer, or not of that class; pass "
                "the argument"
            )
        fields[name] = make(inner_kind, value, f"{what}, {name!r}")
    try:
        inspect.signature(kind).bind(**fields)
    except TypeError as error:
        raise ConfigError(
            f"{what} does not fit {kind.__name__}: {error}. It was stored by another version of that; pass "
            "the argument"
        ) from None
    return kind(**fields)


def _allowed(annotation: Any, namespace: Mapping[str, Any]) -> list[type]:
    """The dataclasses that an annotation allows: itself, or the members of a union."""
    if isinstance(annotation, str):
        holder = types.SimpleNamespace(__annotations__={"it": annotation})
        try:
            annotation = typing.get_type_hints(holder, dict(namespace))["it"]
        except Exception:  # it may be any expression, for readers or type checkers only
            return []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for each in typing.get_args(annotation) for kind in _allowed(each, namespace)]
    return [annotation] if isinstance(annotation, type) and dataclasses.is_dataclass(annotation) else []


def _field_annotations(kind: type) -> dict[str, Any]:
    return {each.name: each.type for each in dataclasses.fields(kind)}


def _namespace(kind: type) -> dict[str, Any]:
    return vars(sys.modules[kind.__module__])
