"""Predictions streamed to files: one safetensors file per batch, and a JSON file with the structure.

Outputs of a type of their own (a named tuple, a dataclass, an output of a Hugging Face model) are stored as a
mapping of their fields, with the type's name and its place: `{"$typed": [[[place, name], ...], structure]}`.
A file never makes the reader import anything: the type must be known where the file is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.utils import _pytree

from drivetrain.checkpoint import export_weights, load_weights, pack, unpack
from drivetrain.checkpoint.files import HashedReader
from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.strict_json import dump_json, parse_json
from drivetrain.containers import opened
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.types import Json

_TYPED = "$typed"


def write_predictions(outputs: Iterable[Any], directory: Path, ranks: Ranks = ALONE) -> list[Path]:
    """Write each batch's outputs as it comes: `predictions-000000.safetensors` holds its tensors, the `.json`
    its structure.

    Args:
        outputs: Trees of tensors, numbers and texts.
        directory: Made if it is not there.
        ranks: The processes. All are given the same outputs, and the first one writes.

    Returns:
        The safetensors files, in order; `read_predictions` reads one back.

    Raises:
        ConfigError: The directory holds predictions already.
        CheckpointError: An output that cannot be stored; says which.
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
            path.with_suffix(".json").write_bytes(structure)
        files.append(path)
    return files


def _make_free(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("predictions-*.safetensors")):
        raise ConfigError(
            f"{directory} already holds predictions; give another directory, or remove them first"
        )


def read_predictions(path: Path, types: Iterable[type] = ()) -> Any:
    """Return one batch's outputs, as `write_predictions` was given them.

    Args:
        path: The safetensors file.
        types: Named tuples and dataclasses that the outputs consist of. Types that torch's pytree knows by
            name, as it knows the outputs of Hugging Face's models once these are imported, need not be given.

    Raises:
        DamagedCheckpointError: One of the two files is missing, or not what was written.
        CheckpointError: It may not be read, or holds a type that is not known here.
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
    """Replace containers of a type of their own by dicts of their fields; add place and type to `places`."""
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
    """Make the dict of fields at a place an object of its type again."""
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
            f"these predictions hold a {name}, a type that is not known here. Pass the class:"
            f" read_predictions(path, types=[{name.rpartition('.')[2]}])"
        )
    if issubclass(kind, (tuple, Mapping)):
        return kind(**output)
    made = object.__new__(kind)
    for field, value in output.items():
        object.__setattr__(made, field, value)  # without its constructor, which may convert or count
    return made
