"""Predictions streamed to files: one safetensors file per batch, and a JSON file with the structure.

Outputs of custom types (a named tuple, a dataclass, an output of a Hugging Face model) are stored as mappings
of their fields, with the type's name: `{"$typed": [name, fields]}`. Reading a file imports nothing: the
reader must already know the types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.utils import _pytree

from drivetrain.checkpoint import export_weights, load_weights
from drivetrain.checkpoint.format.strict_json import dump_json, parse_json
from drivetrain.checkpoint.format.tensors import check_tensor
from drivetrain.checkpoint.storage.files import HashedReader, write_atomically
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, os_errors
from drivetrain.core.containers import opened
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.distributed import tree
from drivetrain.distributed.ranks import ALONE, Ranks


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
        packed, tensors = tree.pack(output, check_tensor, _fields)
        structure = dump_json(packed, f"the structure of predictions {number}")
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
        raise ConfigError(f"{directory} already holds predictions: give another directory, or remove them")


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
    known = {**_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, **{_name(each): each for each in types}}
    tensors = load_weights(path)
    try:
        return tree.unpack(content, tensors, _maker(known))
    except (tree.MalformedError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{str(structure)!r} does not describe its predictions: {error}"
        ) from error


def _fields(value: Any) -> tuple[str, Any] | None:
    """Return the name and the fields of a named tuple, a dataclass or the like; None for another value."""
    container = opened(value) if _has_fields(type(value)) else None
    if container is None:
        return None
    return _name(type(value)), dict(zip(container.names, container.entries, strict=True))


def _has_fields(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _maker(known: Mapping[str, type]) -> Callable[[str, Any], Any]:
    """Return the function that makes an object of one of these types from its name and fields."""

    def make(name: str, fields: Any) -> Any:
        kind = known.get(name)
        if kind is None or not _has_fields(kind):
            raise CheckpointError(
                f"these predictions contain a {name}, which is an unknown type. Pass the class:"
                f" read_predictions(path, types=[{name.rpartition('.')[2]}])"
            )
        if not isinstance(fields, dict):
            raise TypeError(f"the fields of a {name} are a {type(fields).__name__}")
        if issubclass(kind, (tuple, Mapping)):
            return kind(**fields)
        made = object.__new__(kind)
        for field, value in fields.items():
            object.__setattr__(made, field, value)  # not by its constructor, which may convert values
        return made

    return make
