"""Take the files that are stored beside the weights out of a checkpoint, or write them to another folder."""

from __future__ import annotations

import os
from collections.abc import Mapping

from drivetrain.checkpoint.saving.reading import open_checkpoint
from drivetrain.checkpoint.saving.run_directory import resolve
from drivetrain.checkpoint.storage.files import write_atomically
from drivetrain.checkpoint.storage.filesystem import FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import CheckpointError


def write_assets(folder: str, contents: Mapping[str, bytes], files: FileSystem | None = None) -> None:
    """Write assets to a folder, replacing files of the same names; other files there stay."""
    files = file_system(folder) if files is None else files
    for name, content in contents.items():
        write_atomically(files.join(folder, name), [content], files)


def copy_assets(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[str]:
    """Copy the assets of a checkpoint to a folder; each file is verified before it is written.

    Args:
        path: A checkpoint, or a run directory (its newest good checkpoint); also an address.
        folder: Where to write them; made if it does not exist.

    Returns:
        The paths of the files, sorted; empty if the checkpoint has no assets.

    Raises:
        DamagedCheckpointError: A file is missing or damaged; earlier ones have been written.
        CheckpointError: There is no checkpoint, it cannot be read, or a file exists already; in the last case
            nothing is written.
    """
    reader, target = open_checkpoint(resolve(path)), os.fspath(folder)
    files = file_system(target)
    paths = {name: files.join(target, name) for name in sorted(reader.assets)}
    for path in paths.values():
        with os_errors("read", path):
            if files.kind(files.absolute(path)) is not None:
                raise CheckpointError(f"{path!r} exists already. Give an empty folder, or remove it")
    for name, path in paths.items():
        write_atomically(path, [reader.asset(name)], files)
    return list(paths.values())
