"""Writing files durably and reading them with a hash. Nothing here knows what a checkpoint is.

Hashes are XXH3-128 (xxhash.com): at memory speed it finds flipped bits, torn writes and mixed-up files. It is
no signature: whoever can write the files can also write their hashes. They are taken of the bytes that are
handed to the system; nothing is read back, and a fault between here and the disk shows when a file is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeAlias

import xxhash

from drivetrain.checkpoint.filesystem import (
    LOCAL,
    DamagedCheckpointError,
    FileSystem,
    Sink,
    os_errors,
)
from drivetrain.checkpoint.strict_json import MAX_JSON_BYTES

CHUNK = 1 << 20
"""Bytes hashed and written, or read and hashed, at a time: few enough to be in the cache the second time."""

SAVING = ".saving-"
"""How the names of unfinished files and directories begin; what carries it after a kill may be deleted."""

REMOVING = ".removing-"
"""How the names of checkpoints that are being deleted begin; what carries it after a kill may be deleted."""

Bytes: TypeAlias = bytes | memoryview


def write_file(path: str, chunks: Iterable[Bytes], files: FileSystem = LOCAL) -> int:
    """Write a new file, durably.

    Args:
        path: A file that does not exist yet.
        chunks: The content in order; taken one at a time.
        files: Where.

    Returns:
        The size in bytes.

    Raises:
        OSError: It could not be written; the caller deletes the unfinished file.
    """
    size = 0
    with finished(files.create(path)) as sink:
        for chunk in chunks:
            size += len(chunk)
            write_chunk(sink, memoryview(chunk))
            del chunk  # it may hold a copy of a tensor, which must go before the next is made
    return size


@contextmanager
def finished(sink: Sink) -> Iterator[Sink]:
    """Finish a new file at the end; abort it on an error."""
    try:
        yield sink
    except BaseException:
        with suppress(OSError):  # the first cause is on its way
            sink.abort()
        raise
    sink.finish()


def write_chunk(sink: Sink, rest: memoryview) -> None:
    """Write all of some bytes; the sink may take fewer at a time."""
    while rest:
        taken = sink.write(rest)
        if taken == 0:
            raise OSError("the system takes no more bytes, and gives no reason")
        rest = rest[taken:]


def write_atomically(path: str, chunks: Iterable[Bytes], files: FileSystem = LOCAL) -> None:
    """Write a file so that at any moment, a power cut included, `path` is the old one or the new one, whole.

    Raises:
        CheckpointError: It could not be written; what stood there before still does.
    """
    path = files.absolute(path)
    parent, name = files.split(path)
    with os_errors("write", path):
        files.make_directory(parent)
        with replacing(path, f"{SAVING}{name}-{secrets.token_hex(4)}", files) as place:
            write_file(place, chunks, files)


@contextmanager
def replacing(path: str, hidden: str, files: FileSystem) -> Iterator[str]:
    """Replace a file in one step by the new one that the caller writes to the path that it is given.

    Args:
        path: The file; its directory exists.
        hidden: The name of the new file until it is whole. It is deleted on an error.
        files: Where. An object store replaces its objects in one step itself.
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
    """Clean up after a failure without hiding it behind a failure to clean up."""
    # What stays has a name that is never taken for a checkpoint, and that the next open deletes.
    with suppress(OSError):
        files.delete(path)


class HashedReader:
    """A regular file, read once from front to back while its hash is computed.

    Args:
        path: The file. Symbolic links, pipes and devices are refused: they may lead anywhere, or never end.
        files: Where.

    Attributes:
        path: As given.
        size: In bytes.
        position: The next byte to be read.

    Raises:
        DamagedCheckpointError: No such file, or no regular one.
        CheckpointError: It cannot be opened.
    """

    def __init__(self, path: str, files: FileSystem = LOCAL) -> None:
        self.path = path
        self.position = 0
        self._digest = xxhash.xxh3_128()
        with os_errors("read", path):
            kind = files.kind(path)
            if kind is None:
                raise DamagedCheckpointError(f"{path!r} is missing")
            if kind != "file":
                what = "a symbolic link" if kind == "link" else "not a regular file"
                raise DamagedCheckpointError(f"{path!r} is {what}; a checkpoint holds plain files only")
            self._source = files.open(path)
            self.size = self._source.size

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes.

        Raises:
            DamagedCheckpointError: The file ends before.
        """
        done = 0
        with os_errors("read", self.path):
            while done < len(target):
                count = self._source.read_into(target[done : done + CHUNK])
                if not count:
                    raise DamagedCheckpointError(
                        f"{self.path!r} ends early: {len(target) - done} bytes are missing"
                    )
                self._digest.update(target[done : done + count])
                done += count
                self.position += count

    def read(self, count: int) -> bytearray:
        """The next `count` bytes."""
        data = bytearray(count)
        self.read_into(memoryview(data))
        return data

    def read_json(self) -> bytearray:
        """The whole of a small file.

        Raises:
            DamagedCheckpointError: It is larger than any file of ours.
        """
        if self.size > MAX_JSON_BYTES:
            raise DamagedCheckpointError(
                f"{self.path!r} has {self.size} bytes; at most {MAX_JSON_BYTES} are allowed"
            )
        return self.read(self.size)

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes and forget them."""
        scratch = memoryview(bytearray(min(count, CHUNK)))
        while count:
            piece = scratch[: min(count, CHUNK)]
            self.read_into(piece)
            count -= len(piece)

    def begin_piece(self, position: int) -> None:
        """Go on at this byte, with a hash of its own for what is read from there."""
        if position != self.position:
            with os_errors("read", self.path):
                self._source.seek(position)
            self.position = position
        self._digest.reset()

    def check_size(self, size: int) -> None:
        """Compare with what the manifest says, before anything is read.

        Raises:
            DamagedCheckpointError: They differ.
        """
        if self.size != size:
            raise DamagedCheckpointError(f"{self.path!r} has {self.size} bytes, but {size} were written")

    def check_hash(self, expected: str, what: str = "") -> None:
        """Compare the hash of what was read, since the start or the last `begin_piece`, with the manifest's.

        Raises:
            DamagedCheckpointError: They differ.
        """
        found = self._digest.hexdigest()
        if found != expected:
            raise DamagedCheckpointError(
                f"{self.path!r} is not what was written{what and f' at {what}'}: its hash is {found}, "
                f"not {expected}"
            )
