"""Which file system a path is in."""

from __future__ import annotations

from functools import cache
from urllib.request import url2pathname

from drivetrain.checkpoint.filesystem import LOCAL, FileSystem, Kind, Sink, Source
from drivetrain.checkpoint.remote import RemoteFileSystem
from drivetrain.errors import CheckpointError


def file_system(path: str) -> FileSystem:
    """The file system that a path or an address ("s3://bucket/run") belongs to.

    Raises:
        MissingDependencyError: The package that such an address needs is not installed.
        CheckpointError: An address of an unknown kind.
    """
    scheme, separator, _ = path.partition("://")
    if not separator:
        return LOCAL
    if scheme.lower() != "file":
        return _remote(scheme.lower())
    plain_path(path)
    return _FILE_ADDRESSES


@cache
def _remote(protocol: str) -> RemoteFileSystem:
    return RemoteFileSystem(protocol)


class FileAddresses:
    """The local file system, for whoever gives "file:///data/run" in place of "/data/run".

    Not fsspec's: a local disk renames, and so gives a stronger promise than an object store.
    """

    renames = LOCAL.renames

    def absolute(self, path: str) -> str:
        """See `FileSystem.absolute`; the path itself, not an address."""
        return LOCAL.absolute(plain_path(path))

    def join(self, directory: str, name: str) -> str:
        """See `FileSystem.join`."""
        return LOCAL.join(plain_path(directory), name)

    def split(self, path: str) -> tuple[str, str]:
        """See `FileSystem.split`."""
        return LOCAL.split(plain_path(path))

    def kind(self, path: str) -> Kind | None:
        """See `FileSystem.kind`."""
        return LOCAL.kind(plain_path(path))

    def entries(self, directory: str) -> dict[str, Kind]:
        """See `FileSystem.entries`."""
        return LOCAL.entries(plain_path(directory))

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`."""
        return LOCAL.create(plain_path(path))

    def open(self, path: str) -> Source:
        """See `FileSystem.open`."""
        return LOCAL.open(plain_path(path))

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`."""
        LOCAL.make_directory(plain_path(path))

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`."""
        LOCAL.sync(plain_path(directory))

    def rename(self, old: str, new: str) -> None:
        """See `FileSystem.rename`."""
        LOCAL.rename(plain_path(old), plain_path(new))

    def delete(self, path: str) -> None:
        """See `FileSystem.delete`."""
        LOCAL.delete(plain_path(path))


_FILE_ADDRESSES = FileAddresses()


def plain_path(path: str) -> str:
    """The path that an address "file://..." stands for (RFC 8089: "%20" is a blank); a path as it is.

    Raises:
        CheckpointError: The address names another machine.
    """
    scheme, separator, rest = path.partition("://")
    if not separator or scheme.lower() != "file":
        return path
    host, slash, inside = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise CheckpointError(
            f"{path!r} names the machine {host!r}: an address of a file here begins with three slashes, as "
            "'file:///data/run', and a relative path is given without 'file://'"
        )
    return url2pathname(f"/{inside}")
