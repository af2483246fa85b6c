"""Predictions streamed to files: one safetensors file per batch, and a JSON file with the structure.

Outputs of custom types (a named tuple, a dataclass, an output of a Hugging Face model) are stored as mappings
of their fields, with each type's place and name: `{"$typed": [[[place, name], ...], structure]}`. Reading a
file imports nothing: the reader must already know the types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils import _pytree

from drivetrain.checkpoint import export_weights, load_weights, pack, unpack
from drivetrain.checkpoint.format.strict_json import dump_json, parse_json
from drivetrain.checkpoint.storage.files import HashedReader, write_atomically
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, os_errors
from drivetrain.core.containers import opened
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.types import Json
from drivetrain.distributed.ranks import ALONE, Ranks

_TYPED = "$typed"


def write_predictions(outputs: Iterable[Any], directory: Path, ranks: Ranks = ALONE) -> list[Path]:
    """Write each batch's outputs as it comes: `predictions-000000.safetensors` holds its tensors, the `.json`
    its structure.

    Args:
        ranks: The processes. All get the same outputs, and the first one writes.

    Returns:
        The safetensors files, in order; `read_predictions` reads one back.

    Raises:
        ConfigError: The directory already holds predictions.
        CheckpointError: An output cannot be stored; names it.
    """
    ranks.first(lambda: _make_free(directory))
    files = []
    for number, output in enumerate(outputs):
        places: list[Any] = []
        packed, tensors = pack(_fields(output, [], places))
        structure = dump_json(
            {_TYPED: [places, packed]} if places else packed, f"the structure of predictions {number}"
        )
        path = directory / f"predictions-{number:06d}.safetensors"
        if ranks.rank == 0:
            export_weights(tensors, path)
            write_atomically(str(path.with_suffix(".json")), [structure])
        files.append(path)
    return files


def _make_free(directory: Path) -> None:
    with os_errors("create", str(directory)):
        directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("predictions-*")):
        raise ConfigError(
            f"{directory} already holds predictions; give another directory, or remove them first"
        )


def read_predictions(path: Path, types: Iterable[type] = ()) -> Any:
    """Return one batch's outputs, as `write_predictions` was given them.

    Args:
        path: The safetensors file.
        types: Named tuples and dataclasses in the outputs. Types that torch's pytree knows by name, such as
            the outputs of imported Hugging Face models, may be left out.

    Raises:
        DamagedCheckpointError: One of the two files is missing or damaged.
        CheckpointError: There is no permission to read, or a type is unknown.
    """
    structure = path.with_suffix(".json")
    with HashedReader(str(structure)) as reader:
        content = parse_json(reader.read_json(), repr(str(structure)))
    if not (isinstance(content, dict) and list(content) == [_TYPED]):
        return unpack(content, load_weights(path))
    known = {**_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, **{_name(each): each for each in types}}
    try:
        places, packed = cast("tuple[list[Any], Json]", content[_TYPED])
        output = unpack(packed, load_weights(path))
        for place, name in reversed(places):  # the innermost first
            output = _replaced(output, place, name, known)
    except (TypeError, ValueError, LookupError) as error:
        raise DamagedCheckpointError(
            f"{str(structure)!r} does not describe its predictions: {error}"
        ) from error
    return output


def _fields(value: Any, place: list[Any], places: list[Any]) -> Any:
    """Replace containers of custom types by dicts of their fields; add each place and type to `places`."""
    container = opened(value)
    if container is None:
        return value
    names = container.names
    typed = _has_fields(type(value))
    if typed:
        places.append([place, _name(type(value))])
    mapped = [
        _fields(each, [*place, name], places) for name, each in zip(names, container.entries, strict=True)
    ]
    return dict(zip(names, mapped, strict=True)) if typed else container.rebuild(mapped)


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _replaced(output: Any, place: list[Any], name: str, known: Mapping[str, type]) -> Any:
    """Replace the dict of fields at a place by an object of its type."""
    if place:
        container = opened(output)
        if container is None:
            raise LookupError(f"nothing at {place}")
        key = list(container.names).index(place[0])
        container.entries[key] = _replaced(container.entries[key], place[1:], name, known)
        return container.rebuild(container.entries)
    kind = known.get(name)
    if kind is None or not _has_fields(kind):
        raise CheckpointError(
            f"these predictions contain a {name}, which is an unknown type. Pass the class:"
            f" read_predictions(path, types=[{name.rpartition('.')[2]}])"
        )
    if issubclass(kind, (tuple, Mapping)):
        return kind(**output)
    made = object.__new__(kind)
    for field, value in output.items():
        object.__setattr__(made, field, value)  # not by its constructor, which may convert values
    return made
