"""The file system of a path, by its URL scheme."""

from __future__ import annotations

import re
from functools import cache

from drivetrain.checkpoint.storage.filesystem import LOCAL, FileSystem
from drivetrain.core.errors import CheckpointError

_WITHOUT_USERS = {"s3", "s3a", "gs", "gcs", "hf"}
"""Schemes whose clients would read a password in an address as a part of a name, and print it."""


def file_system(path: str) -> FileSystem:
    """Return the file system for a path or an address ("s3://bucket/run")."""
    scheme, separator, rest = path.partition("://")
    if scheme.lower() == "file" and separator:
        raise CheckpointError(f"{path!r} is an address: give the path of a file here, such as '/data/run'")
    if scheme.lower() in _WITHOUT_USERS and re.match(r"[^/]*:[^/]*@", rest):
        raise CheckpointError(
            f"{path!r} has a user and a password, which an address of {scheme}:// cannot have. Give the"
            " credentials as its client reads them, from environment variables or its configuration"
        )
    return _remote(scheme.lower()) if separator else LOCAL


@cache
def _remote(protocol: str) -> FileSystem:
    from drivetrain.checkpoint.storage.remote import RemoteFileSystem

    return RemoteFileSystem(protocol)
