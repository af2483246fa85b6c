"""Write files durably, and read them with a hash. Nothing here knows what a checkpoint is.

Hashes are XXH3-128 (xxhash.com). At memory speed they find flipped bits, torn writes and mixed-up files. They
are no signature: whoever can write the files can also write their hashes. The hash covers the bytes that are
passed to the system. Nothing is read back: a fault between here and the disk shows when the file is read.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeAlias

import xxhash

from drivetrain.checkpoint.format.strict_json import MAX_JSON_BYTES
from drivetrain.checkpoint.storage.filesystem import (
    LOCAL,
    SAVING,
    ByteSource,
    DamagedCheckpointError,
    FileSystem,
    Sink,
    os_errors,
)

CHUNK = 1 << 20
"""Bytes hashed and written, or read and hashed, at a time: few enough to stay in the cache in between."""

Bytes: TypeAlias = bytes | memoryview


def write_file(path: str, chunks: Iterable[Bytes], files: FileSystem = LOCAL) -> int:
    """Write a new file, durably.

    Args:
        path: A file that does not exist yet.
        chunks: The content in order; consumed one at a time.
        files: The file system.

    Raises:
        OSError: The write failed; the caller deletes the unfinished file.
    """
    with finished(files.create(path)) as sink:
        return write_chunks(sink, chunks)


@contextmanager
def finished(sink: Sink) -> Iterator[Sink]:
    """Run the block, and finish a new file at its end; abort it on an error."""
    try:
        yield sink
    except BaseException:
        with suppress(OSError):  # the first error is already propagating
            sink.abort()
        raise
    sink.finish()


def write_chunks(sink: Sink, chunks: Iterable[Bytes]) -> int:
    """Write all chunks, and return their size in bytes."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        write_chunk(sink, memoryview(chunk))
        del chunk  # it may hold a copy of a tensor, which must be freed before the next is made
    return size


def write_chunk(sink: Sink, rest: memoryview) -> None:
    """Write all bytes, although the sink may take only a part at a time."""
    while rest:
        taken = sink.write(rest)
        if taken == 0:
            raise OSError("the system takes no more bytes, and gives no reason")
        rest = rest[taken:]


def write_atomically(path: str, chunks: Iterable[Bytes], files: FileSystem = LOCAL) -> None:
    """Write a file atomically: even after a power cut, `path` is the old file or the new one, complete.

    Raises:
        CheckpointError: The write failed; the old file is unchanged.
    """
    path = files.absolute(path)
    parent, name = files.split(path)
    with os_errors("write", path):
        files.make_directory(parent)
        with replacing(path, f"{SAVING}{name}-{secrets.token_hex(4)}", files) as place:
            write_file(place, chunks, files)


@contextmanager
def replacing(path: str, hidden: str, files: FileSystem) -> Iterator[str]:
    """Run the block, which writes to the path it gets; then replace a file by that one in one step.

    Args:
        path: The file; its directory exists.
        hidden: The name of the new file until it is complete. The file is deleted on an error.
        files: The file system. An object store replaces objects in one step by itself.
    """
    if not files.renames:
        yield path
        return
    parent = files.split(path)[0]
    temporary = files.join(parent, hidden)
    try:
        yield temporary
        files.rename(temporary, path)
    except BaseException:
        delete_if_there(temporary, files)
        raise
    files.sync(parent)


def delete_if_there(path: str, files: FileSystem) -> None:
    """Delete a file after a failure; if that fails too, the first failure is still the one that is raised."""
    # A file that stays has a name that no checkpoint has, and the next open deletes it.
    with suppress(OSError):
        files.delete(path)


def _open_plain(path: str, files: FileSystem) -> ByteSource:
    with os_errors("read", path):
        kind = files.kind(path)
        if kind is None:
            raise DamagedCheckpointError(f"{path!r} is missing")
        if kind != "file":
            what = "a symbolic link" if kind == "link" else "not a regular file"
            raise DamagedCheckpointError(f"{path!r} is {what}; a checkpoint holds plain files only")
        return files.open(path)


class HashedReader:
    """A regular file that is read once from front to back while its hash is computed.

    Args:
        path: The file. Symbolic links, pipes and devices raise: they may lead anywhere, or never end.
        files: The file system.
        source: The open file; None opens the one at the path.

    Raises:
        DamagedCheckpointError: The file is missing, or not a regular file.
        CheckpointError: The file cannot be opened.
    """

    def __init__(self, path: str, files: FileSystem = LOCAL, source: ByteSource | None = None) -> None:
        self.path = path
        self.position = 0
        self._digest = xxhash.xxh3_128()
        self._source = _open_plain(path, files) if source is None else source
        with os_errors("read", path):
            self.size = self._source.seek(0, io.SEEK_END)
            self._source.seek(0)

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes."""
        done = 0
        with os_errors("read", self.path):
            while done < len(target):
                count = self._source.readinto(target[done : done + CHUNK])
                if not count:
                    raise DamagedCheckpointError(
                        f"{self.path!r} ends early: {len(target) - done} bytes are missing"
                    )
                self._digest.update(target[done : done + count])
                done += count
                self.position += count

    def read(self, count: int) -> bytearray:
        data = bytearray(count)
        self.read_into(memoryview(data))
        return data

    def read_json(self) -> bytearray:
        """Return the content of a small file."""
        if self.size > MAX_JSON_BYTES:
            raise DamagedCheckpointError(
                f"{self.path!r} has {self.size} bytes; at most {MAX_JSON_BYTES} are allowed"
            )
        return self.read(self.size)

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes without keeping them."""
        scratch = memoryview(bytearray(min(count, CHUNK)))
        while count:
            piece = scratch[: min(count, CHUNK)]
            self.read_into(piece)
            count -= len(piece)

    def begin_piece(self, position: int) -> None:
        """Seek to this byte, and start a new hash there."""
        if position != self.position:
            with os_errors("read", self.path):
                self._source.seek(position)
            self.position = position
        self._digest.reset()

    def check_size(self, size: int) -> None:
        """Compare the file's size with the manifest's, before reading."""
        if self.size != size:
            raise DamagedCheckpointError(f"{self.path!r} has {self.size} bytes, but {size} were written")

    def check_hash(self, expected: str, what: str = "") -> None:
        """Compare the hash of the bytes read since the start, or since `begin_piece`, with the manifest's."""
        found = self._digest.hexdigest()
        if found != expected:
            raise DamagedCheckpointError(
                f"{self.path!r} is not what was written{what and f' at {what}'}: its hash is {found}, "
                f"not {expected}"
            )
