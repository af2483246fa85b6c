"""Write files durably, and read them with a hash. Nothing here knows what a checkpoint is.

Hashes are XXH3-128 (xxhash.com). At memory speed they find flipped bits, torn writes and mixed-up files. They
are no signature: whoever can write the files can also write their hashes. The hash covers the bytes that are
passed to the system. Nothing is read back: a fault between here and the disk shows when the file is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
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
    sink = files.create(path)
    try:
        size = write_chunks(sink, chunks)
    except BaseException:
        with suppress(OSError):  # the first error is already propagating
            sink.abort()
        raise
    sink.finish()
    return size


def write_chunks(sink: Sink, chunks: Iterable[Bytes]) -> int:
    """Write all chunks, and return their size in bytes; the sink may take only a part at a time."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        rest = memoryview(chunk)
        while rest:
            taken = sink.write(rest)
            if taken == 0:
                raise OSError("the system takes no more bytes, and gives no reason")
            rest = rest[taken:]
        del chunk, rest  # a copy of a tensor, perhaps, which must be freed before the next is made
    return size


def write_atomically(path: str, chunks: Iterable[Bytes], files: FileSystem = LOCAL) -> None:
    """Write a file atomically: even after a power cut, `path` is the old file or the new one, complete.

    Raises:
        CheckpointError: The write failed; the old file is unchanged.
    """
    path = files.absolute(path)
    parent, _ = files.split(path)
    with os_errors("write", path):
        files.make_directory(parent)
        if not files.renames:  # an object store replaces objects in one step by itself
            write_file(path, chunks, files)
            return
        with replacing(path, files) as temporary:
            write_file(temporary, chunks, files)
        files.sync(parent)


@contextmanager
def replacing(path: str, files: FileSystem = LOCAL) -> Iterator[str]:
    """Yield the path of a new file, which replaces the one at `path` once the block has ended well.

    A reader, or a kill, finds the old file or the new one. The new file has a name of its own beside `path`,
    always the same, so that the next writer deletes what a kill has left.

    Raises:
        OSError: It cannot be deleted or renamed.
    """
    parent, name = files.split(path)
    temporary = files.join(parent, f"{SAVING}{name}")
    try:
        if files.kind(temporary) is not None:
            files.delete(temporary)
        yield temporary
        files.rename(temporary, path)
    except BaseException:
        delete_if_there(temporary, files)
        raise


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

    def __exit__(self, *_: object) -> None:
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
                    raise DamagedCheckpointError(f"{self.path!r} ends {len(target) - done} bytes early")
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
                f"{self.path!r} has {self.size} bytes, over the {MAX_JSON_BYTES} allowed"
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
