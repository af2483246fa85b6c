"""The file system of a path, by its URL scheme."""

from __future__ import annotations

from functools import cache

from drivetrain.checkpoint.storage.filesystem import LOCAL, FileSystem, plain_path


def file_system(path: str) -> FileSystem:
    """Return the file system for a path or an address ("s3://bucket/run")."""
    scheme, separator, _ = path.partition("://")
    if separator and scheme.lower() != "file":
        return _remote(scheme.lower())
    plain_path(path)  # raises for a file on another machine
    return LOCAL


@cache
def _remote(protocol: str) -> FileSystem:
    from drivetrain.checkpoint.storage.remote import RemoteFileSystem

    return RemoteFileSystem(protocol)
