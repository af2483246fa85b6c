"""Predictions streamed to files: one safetensors file a batch, with the structure in its metadata's place
beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drivetrain.checkpoint import export_weights, load_weights, pack, unpack
from drivetrain.checkpoint.files import HashedReader
from drivetrain.checkpoint.strict_json import dump_json, parse_json
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.errors import ConfigError


def write_predictions(outputs: Iterable[Any], directory: Path, ranks: Ranks = ALONE) -> list[Path]:
    """Write each batch's outputs as it comes: `predictions-000000.safetensors` holds its tensors, the `.json`
    its structure.

    Args:
        outputs: Trees of tensors, numbers and texts.
        directory: Made if it is not there.
        ranks: All of which are given the same outputs; the first one writes.

    Returns:
        The safetensors files, in order; `read_predictions` reads one back.

    Raises:
        ConfigError: The directory holds predictions already.
        CheckpointError: An output that cannot be stored; says which.
    """
    ranks.first(lambda: _make_free(directory))
    files = []
    for number, output in enumerate(outputs):
        packed, tensors = pack(output)
        structure = dump_json(packed, f"the structure of predictions {number}")
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


def read_predictions(path: Path) -> Any:
    """One batch's outputs, as `write_predictions` was given them.

    Args:
        path: The safetensors file.

    Raises:
        DamagedCheckpointError: One of the two files is missing, or not what was written.
        CheckpointError: It may not be read.
    """
    structure = path.with_suffix(".json")
    with HashedReader(str(structure)) as reader:
        packed = parse_json(reader.read_json(), repr(str(structure)))
    return unpack(packed, load_weights(path))
