"""The few file operations that checkpoints are made of, and what they are on a local disk.

Everything under `drivetrain.checkpoint` that touches a file goes through a `FileSystem`, so that the same
code serves a disk, an object store and, in the tests, a disk that fails at any one of these operations.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias
from urllib.request import url2pathname

from drivetrain.errors import CheckpointError

Kind: TypeAlias = Literal["file", "directory", "link", "other"]
"""What a name stands for; "other" is a pipe, a device or a socket."""

_ADVICE = {
    errno.ENOSPC: "free some space, or save to another disk",
    errno.EDQUOT: "free some of your quota, or save elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save to another disk",
    errno.EACCES: "check the permissions, or use another directory",
    errno.EPERM: "check the permissions, or use another directory",
    errno.EROFS: "use a directory on a writable disk",
}

_WRITE_BEHIND = 32 << 20
"""Bytes after which the disk begins to write, while more are produced: a save takes a fifth less time."""

_SYNC_FILE_RANGE_WRITE = 2
"""A name of Linux's fcntl.h."""

_SYNC_FILE_RANGE: Any = (
    getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
)
"""Linux's call of that name, which Python's os lacks."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is missing, cut short, altered, or was never one.

    Only this error is a reason to set a checkpoint aside. A checkpoint may also be intact and too new for
    this version, or unreadable for a while (permissions, too many open files): then the error is a plain
    `CheckpointError`.
    """


class StorageError(CheckpointError):
    """The storage did not do what was asked of it: it is full, read-only, gone or does not answer.

    Attributes:
        code: The system's name for that, such as "ENOSPC".
    """

    code: str = ""


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> int:
        """Write some of `data`; returns how many bytes were taken, which may be fewer than there are."""
        ...

    def finish(self) -> None:
        """Make the content durable and close; only then does the file count."""
        ...

    def abort(self) -> None:
        """Close without finishing; what is there of the file is left to whoever cleans up."""
        ...


class Source(Protocol):
    """A file that is being read.

    Attributes:
        size: In bytes.
    """

    size: int

    def read_into(self, target: memoryview) -> int:
        """Read some bytes; returns how many, and 0 only at the end."""
        ...

    def seek(self, position: int) -> None:
        """Go on reading at this byte."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class BytesSource:
    """Bytes in memory that are read as a file; a `Source`.

    Args:
        content: All of it.
    """

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self._content = content
        self._position = 0

    def read_into(self, target: memoryview) -> int:
        """See `Source.read_into`."""
        found = self._content[self._position : self._position + len(target)]
        target[: len(found)] = found
        self._position += len(found)
        return len(found)

    def seek(self, position: int) -> None:
        """See `Source.seek`."""
        self._position = position

    def close(self) -> None:
        """See `Source.close`; the memory is free again."""
        self._content = b""


class FileSystem(Protocol):
    """Where files are. Every method raises `OSError` and nothing else.

    Attributes:
        renames: Whether a directory is renamed in one step. Where not, as in an object store, single files
            appear in one step instead, and a checkpoint is committed by its last file.
    """

    renames: bool

    def absolute(self, path: str) -> str:
        """The path, whatever the working directory; an address as it is."""
        ...

    def join(self, directory: str, name: str) -> str:
        """The path of a name inside a directory."""
        ...

    def split(self, path: str) -> tuple[str, str]:
        """A path's directory and its last name."""
        ...

    def kind(self, path: str) -> Kind | None:
        """Return the kind of a file or directory, without following links; None if there is nothing."""
        ...

    def entries(self, directory: str) -> dict[str, Kind]:
        """Return the names in a directory and their kinds; empty if there is no such directory."""
        ...

    def create(self, path: str) -> Sink:
        """Begin a new file."""
        ...

    def open(self, path: str) -> Source:
        """Open a regular file for reading; a link is not followed."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents, durably; none is needed in an object store."""
        ...

    def sync(self, directory: str) -> None:
        """Make the names in a directory durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file or directory another name. A file that has the new name is replaced."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it."""
        ...


def plain_path(path: str) -> str:
    """Return the path that an address "file://..." stands for (RFC 8089: "%20" is a blank); a path as it is.

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


class LocalFileSystem:
    """Local and mounted disks; a path may also be given as an address, such as "file:///data/run".

    Not through fsspec: a local disk renames directories, and so promises more than an object store.
    """

    renames = True

    def absolute(self, path: str) -> str:
        """See `FileSystem.absolute`."""
        return os.path.abspath(plain_path(path))

    def join(self, directory: str, name: str) -> str:
        """See `FileSystem.join`."""
        return os.path.join(plain_path(directory), name)

    def split(self, path: str) -> tuple[str, str]:
        """See `FileSystem.split`."""
        return os.path.split(plain_path(path))

    def kind(self, path: str) -> Kind | None:
        """See `FileSystem.kind`."""
        try:
            mode = os.lstat(plain_path(path)).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None  # a ValueError where a file cannot have such a name: a zero, half a surrogate pair
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "directory"
        return "link" if stat.S_ISLNK(mode) else "other"

    def entries(self, directory: str) -> dict[str, Kind]:
        """See `FileSystem.entries`."""
        directory = plain_path(directory)
        if not os.path.isdir(directory):
            return {}
        with os.scandir(directory) as found:
            return {entry.name: _kind_of(entry) for entry in found}

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`; a file that is there already is an error."""
        return _LocalSink(plain_path(path))

    def open(self, path: str) -> Source:
        """See `FileSystem.open`."""
        return _LocalSource(plain_path(path))

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`."""
        path = plain_path(path)
        parent = os.path.dirname(path)
        if os.path.isdir(path) or parent == path:
            return
        self.make_directory(parent)
        os.makedirs(path, exist_ok=True)
        self.sync(parent)

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`. Windows has no such call and journals names by itself."""
        if os.name == "nt":
            return
        descriptor = os.open(plain_path(directory), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        """See `FileSystem.rename`."""
        os.replace(plain_path(old), plain_path(new))

    def delete(self, path: str) -> None:
        """See `FileSystem.delete`."""
        path = plain_path(path)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


class _LocalSink:
    def __init__(self, path: str) -> None:
        # Unbuffered: chunks are large, and are in the processor's cache from being hashed.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._written = 0
        self._begun = 0

    def write(self, data: memoryview) -> int:
        taken = self._file.write(data)
        self._written += taken
        if self._written - self._begun >= _WRITE_BEHIND:
            self._begin_writing()
        return taken

    def _begin_writing(self) -> None:
        """Have the disk begin with what is in the system's memory, rather than in `finish`.

        Not `posix_fadvise`: that begins it too, but then drops the file from memory, and a run that is
        started again would read it from the disk.
        """
        if _SYNC_FILE_RANGE is not None:
            start, length = (ctypes.c_int64(each) for each in (self._begun, self._written - self._begun))
            # What it returns does not matter: it only begins, and `finish` hears of every error.
            _SYNC_FILE_RANGE(self._file.fileno(), start, length, _SYNC_FILE_RANGE_WRITE)
        self._begun = self._written

    def finish(self) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abort(self) -> None:
        self._file.close()


class _LocalSource:
    def __init__(self, path: str) -> None:
        # Unbuffered: every read goes straight to where the bytes are wanted.
        self._file = open(path, "rb", buffering=0, opener=_open_no_follow)  # noqa: SIM115
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, target: memoryview) -> int:
        return self._file.readinto(target)

    def seek(self, position: int) -> None:
        self._file.seek(position)

    def close(self) -> None:
        self._file.close()


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


LOCAL = LocalFileSystem()
"""The one local file system; it has no state."""


def in_words(action: str, path: str, error: OSError) -> tuple[str, str]:
    """Return the text of `os_errors` for an error, and the system's name for the error."""
    advice = _ADVICE.get(error.errno or 0)
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    text = f"cannot {action} {path!r}: {error.strerror or error} ({name})"
    return (f"{text}; {advice}" if advice else text), name


@contextmanager
def os_errors(action: str, path: str) -> Iterator[None]:
    """Turn the system's errors into ones that say what was being done, where, and what may help.

    Args:
        action: A verb, "write" or "read", that fits after "cannot".
        path: What the action is done to.

    Raises:
        StorageError: In place of any OSError.
        DamagedCheckpointError: In place of an input/output error while reading: the medium has lost the
            bytes.
    """
    try:
        yield
    except OSError as error:
        text, name = in_words(action, path, error)
        if action == "read" and error.errno == errno.EIO:
            raise DamagedCheckpointError(text) from error
        refused = StorageError(text)
        refused.code = name
        raise refused from error
