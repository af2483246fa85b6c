"""The protocol of the few file operations that checkpoints need, and its implementation for local disks.

All code under `drivetrain.checkpoint` touches files through a `FileSystem`, so that it works on a disk, on an
object store and, in the tests, on a disk that fails at any one of these operations.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias

from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import descriptor_of_file

Kind: TypeAlias = Literal["file", "directory", "link", "other"]
"""The kind of a directory entry; "other" is a pipe, a device or a socket."""

ByteSource: TypeAlias = io.RawIOBase | io.BufferedIOBase
"""A file that is being read: a stream of Python's that can seek. `readinto` reads nothing only at the end."""

_ADVICE = {
    errno.ENOSPC: "free some space, or save to another disk",
    errno.EDQUOT: "free some of your quota, or save elsewhere",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or save to another disk",
    errno.EACCES: "check the permissions, or use another directory",
    errno.EPERM: "check the permissions, or use another directory",
    errno.EROFS: "use a directory on a writable disk",
}

SAVING = ".saving-"
"""The prefix of unfinished files and directories. After a kill, anything with this prefix may be deleted."""

REMOVING = ".removing-"
"""The prefix of checkpoints that are being deleted. After a kill, whatever has this prefix may be deleted."""

_WRITE_BEHIND = 32 << 20
"""Bytes after which the disk starts writing while more are produced: a save takes a fifth less time."""

_SYNC_FILE_RANGE_WRITE = 2
"""A constant of Linux's fcntl.h."""

_SYNC_FILE_RANGE: Any = (
    getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
)
"""Linux's `sync_file_range`, which Python's os lacks."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is missing, truncated or altered, or a path that never was a checkpoint.

    Only this error is a reason to set a checkpoint aside. An intact checkpoint may be too new for this
    version, or temporarily unreadable (permissions, too many open files): then the error is a plain
    `CheckpointError`.
    """


class StorageError(CheckpointError):
    """A storage operation failed: the storage is full, read-only, gone, or does not answer.

    Attributes:
        code: The system's name for the error, such as "ENOSPC".
    """

    code: str = ""


class Sink(Protocol):
    """A new file that is being written."""

    def write(self, data: memoryview) -> int:
        """Write some of `data`, and return the number of bytes written."""
        ...

    def finish(self) -> None:
        """Make the content durable and close the file; before that, the file does not count."""
        ...

    def abort(self) -> None:
        """Close without finishing; the caller cleans up the partial file."""
        ...


class FileSystem(Protocol):
    """A store of files. Its methods raise `OSError` and nothing else.

    Attributes:
        renames: Whether a directory can be renamed in one step. In an object store it cannot; there each file
            appears in one step, and a checkpoint is committed by its last file.
    """

    renames: bool

    def absolute(self, path: str) -> str:
        """Return the absolute path; an address is returned unchanged."""
        ...

    def join(self, directory: str, name: str) -> str:
        """Return the path of a name in a directory."""
        ...

    def split(self, path: str) -> tuple[str, str]:
        """Return a path's directory and its last name."""
        ...

    def kind(self, path: str) -> Kind | None:
        """Return the kind of a file or directory, without following links; None if there is nothing."""
        ...

    def entries(self, directory: str) -> dict[str, Kind]:
        """Return the names in a directory and their kinds; empty if there is no such directory."""
        ...

    def create(self, path: str) -> Sink:
        """Create a new file."""
        ...

    def open(self, path: str) -> ByteSource:
        """Open a regular file for reading, without following links; a stream such as `io.BytesIO`."""
        ...

    def make_directory(self, path: str) -> None:
        """Create a directory and its missing parents, durably; an object store needs none."""
        ...

    def sync(self, directory: str) -> None:
        """Make the names in a directory durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory; an existing file of the new name is replaced."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with its content."""
        ...


class LocalFileSystem(FileSystem):
    """Local and mounted disks.

    This is not fsspec's local file system: a disk can rename directories, so it promises more than a store.
    """

    renames = True

    def absolute(self, path: str) -> str:
        return os.path.abspath(path)

    def join(self, directory: str, name: str) -> str:
        return os.path.join(directory, name)

    def split(self, path: str) -> tuple[str, str]:
        return os.path.split(path)

    def kind(self, path: str) -> Kind | None:
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None  # ValueError: a name that no file can have, with a null byte or a lone surrogate
        if stat.S_ISREG(mode):
            return "file"
        if stat.S_ISDIR(mode):
            return "directory"
        return "link" if stat.S_ISLNK(mode) else "other"

    def entries(self, directory: str) -> dict[str, Kind]:
        if not os.path.isdir(directory):
            return {}
        with os.scandir(directory) as found:
            return {entry.name: _kind_of(entry) for entry in found}

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`; raises if the file exists."""
        return _LocalSink(path)

    def open(self, path: str) -> ByteSource:
        # Unbuffered: every read goes directly into the caller's memory.
        return open(path, "rb", buffering=0, opener=_open_no_follow)

    def make_directory(self, path: str) -> None:
        parent = os.path.dirname(path)
        if os.path.isdir(path) or parent == path:
            return
        self.make_directory(parent)
        os.makedirs(path, exist_ok=True)
        # An unfinished directory may vanish in a power cut: its files are synced when it is complete.
        if SAVING not in path:
            self.sync(parent)

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`. Windows lacks this call, and journals names by itself."""
        if os.name == "nt":
            return
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)

    def delete(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


class _LocalSink:
    def __init__(self, path: str) -> None:
        # Unbuffered: chunks are large, and hashing has put them into the processor's cache.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        self._written = 0
        self._begun = 0

    def write(self, data: memoryview) -> int:
        taken = self._file.write(data)
        self._written += taken
        # The disk starts writing cached bytes now, rather than in `finish`: the first piece at once, as of a
        # small file that is all. Not with `posix_fadvise`, which also drops the file from memory: a restarted
        # run would read it from the disk.
        ahead = self._written - self._begun
        if _SYNC_FILE_RANGE is not None and (not self._begun or ahead >= _WRITE_BEHIND):
            start, length = ctypes.c_int64(self._begun), ctypes.c_int64(ahead)
            # Its result does not matter: it only starts the write, and `finish` gets every error.
            _SYNC_FILE_RANGE(self._file.fileno(), start, length, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._written
        return taken

    def finish(self) -> None:
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abort(self) -> None:
        self._file.close()


def _open_no_follow(path: str, flags: int) -> int:
    return descriptor_of_file(path, flags | getattr(os, "O_NOFOLLOW", 0))


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "directory"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


LOCAL = LocalFileSystem()
"""The local file system; it has no state."""


def in_words(action: str, path: str, error: OSError) -> tuple[str, str]:
    """Return the message of `os_errors` for an error, and the system's name for the error."""
    advice = _ADVICE.get(error.errno or 0)
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    text = f"cannot {action} {path!r}: {error.strerror or error} ({name})"
    return (f"{text}; {advice}" if advice else text), name


@contextmanager
def os_errors(action: str, path: str) -> Iterator[None]:
    """Run the block with the system's errors turned into ours: the action, the path, and advice.

    Args:
        action: A verb that fits after "cannot", such as "write" or "read".
        path: The path that the action is done to.

    Raises:
        StorageError: The system raised an `OSError`.
        DamagedCheckpointError: The system raised EIO while reading: the medium has lost the bytes.
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
