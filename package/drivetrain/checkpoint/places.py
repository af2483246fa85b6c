"""Which file system a path is in."""

from __future__ import annotations

from functools import cache

from drivetrain.checkpoint.filesystem import LOCAL, FileSystem, plain_path
from drivetrain.checkpoint.remote import RemoteFileSystem


def file_system(path: str) -> FileSystem:
    """Return the file system that a path or an address ("s3://bucket/run") belongs to.

    Raises:
        MissingDependencyError: The package that such an address needs is not installed.
        CheckpointError: An address of an unknown kind.
    """
    scheme, separator, _ = path.partition("://")
    if separator and scheme.lower() != "file":
        return _remote(scheme.lower())
    plain_path(path)  # which refuses a file of another machine
    return LOCAL


@cache
def _remote(protocol: str) -> RemoteFileSystem:
    return RemoteFileSystem(protocol)
