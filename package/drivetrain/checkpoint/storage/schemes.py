"""The file system of a path, by its URL scheme."""

from __future__ import annotations

from functools import cache

from drivetrain.checkpoint.storage.filesystem import LOCAL, FileSystem
from drivetrain.core.errors import CheckpointError


def file_system(path: str) -> FileSystem:
    """Return the file system for a path or an address ("s3://bucket/run")."""
    scheme, separator, _ = path.partition("://")
    if scheme.lower() == "file" and separator:
        raise CheckpointError(f"{path!r} is an address: give the path of a file here, such as '/data/run'")
    return _remote(scheme.lower()) if separator else LOCAL


@cache
def _remote(protocol: str) -> FileSystem:
    from drivetrain.checkpoint.storage.remote import RemoteFileSystem

    return RemoteFileSystem(protocol)
