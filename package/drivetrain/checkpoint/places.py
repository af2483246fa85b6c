"""Which file system a path is in."""

from __future__ import annotations

from drivetrain.checkpoint.filesystem import LOCAL, FileSystem
from drivetrain.errors import CheckpointError


def file_system(path: str) -> FileSystem:
    """The file system that a path or an address ("s3://bucket/run") belongs to.

    Raises:
        CheckpointError: An address of an unknown kind.
    """
    if "://" not in path:
        return LOCAL
    raise CheckpointError(f"{path!r} is an address")
