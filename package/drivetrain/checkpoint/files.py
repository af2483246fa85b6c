"""The ground under a checkpoint: durable writing, hashed reading, strict JSON.

Nothing here knows what a checkpoint is. Hashes are XXH3-128 (xxhash.com): at memory speed it finds flipped
bits, torn writes and mixed-up files. It is no signature: whoever can write the files can also write their
hashes.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeAlias

import xxhash

from drivetrain.errors import CheckpointError
from drivetrain.types import Json

CHUNK = 1 << 20
"""Bytes hashed and written, or read and hashed, at a time: few enough to be in the cache the second time."""

MAX_JSON_BYTES = 64 << 20
"""No JSON of ours is larger; a file that claims to be is refused before it is read."""

SAVING = ".saving-"
"""How the names of unfinished files and directories begin; what carries it after a kill may be deleted."""

REMOVING = ".removing-"
"""How the names of checkpoints that are being deleted begin; what carries it after a kill may be deleted."""

Bytes: TypeAlias = bytes | memoryview

_ADVICE = {
    errno.ENOSPC: "free some space, or save to another disk",
    errno.EDQUOT: "free some of your quota, or save elsewhere",
    errno.EACCES: "check the permissions, or use another directory",
    errno.EPERM: "check the permissions, or use another directory",
    errno.EROFS: "use a directory on a writable disk",
}


class DamagedCheckpointError(CheckpointError):
    """What is on the disk is not what was written: missing, cut short, altered or never a checkpoint.

    Only this is a reason to set a checkpoint aside. One that is merely unreadable just now (permissions, too
    many open files) or too new for this version is intact, and raises a plain `CheckpointError`.
    """


@contextmanager
def os_errors(action: str, path: str) -> Iterator[None]:
    """Turn the system's errors into ones that say what was being done, where, and what may help.

    Args:
        action: A verb, "write" or "read", that fits after "cannot".
        path: What the action is done to.

    Raises:
        CheckpointError: In place of any OSError.
        DamagedCheckpointError: In place of an input/output error while reading: the medium has lost the
            bytes.
    """
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        lost = action == "read" and error.errno == errno.EIO
        raise (DamagedCheckpointError if lost else CheckpointError)(
            f"cannot {action} {path!r}: {error.strerror or error} ({name})"
            + (f"; {advice}" if advice else "")
        ) from error


def sync_directory(path: str) -> None:
    """Make the directory's entries durable. Windows has no such call and journals names by itself."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: str) -> None:
    """Create `path` and its missing parents, each of them durably."""
    parent = os.path.dirname(path)
    if os.path.isdir(path) or parent == path:
        return
    make_directories(parent)
    os.makedirs(path, exist_ok=True)
    sync_directory(parent)


def write_file(path: str, chunks: Iterable[Bytes]) -> tuple[int, str]:
    """Write a new file and sync it.

    The hash is of the bytes as they are handed to the system, so nothing is read back, and a fault between
    here and the disk shows when the file is read.

    Args:
        path: A file that does not exist yet.
        chunks: The content in order; taken one at a time.

    Returns:
        The size in bytes and the XXH3-128 hash, in hexadecimal.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with open(path, "xb") as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), CHUNK):
                digest.update(view[start : start + CHUNK])
                file.write(view[start : start + CHUNK])
            size += len(view)
            del chunk, view  # they may hold a copy of a tensor, which must go before the next is made
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def write_atomically(path: str, chunks: Iterable[Bytes]) -> None:
    """Write a file so that at any moment, a power cut included, `path` is the old one or the new one, whole.

    Raises:
        CheckpointError: It could not be written; what stood there before still does.
    """
    path = os.path.abspath(path)
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f"{SAVING}{name}-{secrets.token_hex(4)}")
    with os_errors("write", path):
        make_directories(parent)
        try:
            write_file(temporary, chunks)
            os.replace(temporary, path)
        except BaseException:
            remove_if_there(os.unlink, temporary)
            raise
        sync_directory(parent)


def remove_if_there(remove: Callable[[str], object], path: str) -> None:
    """Clean up after a failure without hiding it behind a failure to clean up."""
    # What stays has a name that is never taken for a checkpoint, and that the next open deletes.
    with suppress(OSError):
        remove(path)


class HashedReader:
    """A regular file, read once from front to back while its hash is computed.

    Args:
        path: The file. Symbolic links, pipes and devices are refused: they may lead anywhere, or never end.

    Raises:
        DamagedCheckpointError: No such file, or no regular one.
        CheckpointError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._digest = xxhash.xxh3_128()
        with os_errors("read", path):
            try:
                found = os.lstat(path)
            except FileNotFoundError as error:
                raise DamagedCheckpointError(f"{path!r} is missing") from error
            if not stat.S_ISREG(found.st_mode):
                kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
                raise DamagedCheckpointError(f"{path!r} is {kind}; a checkpoint holds plain files only")
            # Unbuffered: every read goes straight to where the bytes are wanted.
            self._file = open(path, "rb", buffering=0, opener=_open_no_follow)  # noqa: SIM115
            self.size = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> HashedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._file.close()

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes.

        Raises:
            DamagedCheckpointError: The file ends before.
        """
        done = 0
        with os_errors("read", self.path):
            while done < len(target):
                count = self._file.readinto(target[done : done + CHUNK])
                if not count:
                    raise DamagedCheckpointError(
                        f"{self.path!r} ends early: {len(target) - done} bytes are missing"
                    )
                self._digest.update(target[done : done + count])
                done += count

    def read(self, count: int) -> bytearray:
        """The next `count` bytes."""
        data = bytearray(count)
        self.read_into(memoryview(data))
        return data

    def skip(self, count: int) -> None:
        """Hash the next `count` bytes and forget them."""
        scratch = memoryview(bytearray(min(count, CHUNK)))
        while count:
            piece = scratch[: min(count, CHUNK)]
            self.read_into(piece)
            count -= len(piece)

    def check_size(self, size: int) -> None:
        """Compare with what the manifest says, before anything is read.

        Raises:
            DamagedCheckpointError: They differ.
        """
        if self.size != size:
            raise DamagedCheckpointError(f"{self.path!r} has {self.size} bytes, but {size} were written")

    def check_hash(self, expected: str) -> None:
        """Compare the hash of all that was read with what the manifest says.

        Raises:
            DamagedCheckpointError: They differ.
        """
        found = self._digest.hexdigest()
        if found != expected:
            raise DamagedCheckpointError(
                f"{self.path!r} is not what was written: its hash is {found}, not {expected}"
            )


def _open_no_follow(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))


def dump_json(value: Json, what: str) -> bytes:
    """Strict, compact JSON in ASCII, so that a lone surrogate in a text survives too.

    Raises:
        CheckpointError: NaN, infinity, a cycle, something that is no JSON, or more than can be read back.
    """
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be written as strict JSON: {error}. Give it through checkpoint.tree.pack, "
            "which stores tensors, tuples, bytes, NaN and infinity exactly"
        ) from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{what} takes {len(data)} bytes as JSON; at most {MAX_JSON_BYTES} are allowed. Keep large data "
            "in tensors or arrays"
        )
    return data


def parse_json(data: bytes | bytearray, what: str) -> Json:
    """Read strict JSON: no NaN, no key twice, no depth or number that would exhaust the interpreter.

    Raises:
        DamagedCheckpointError: It is not that; the text begins with `what`.
    """
    try:
        value: Json = json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise DamagedCheckpointError(f"{what} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, and numbers beyond the interpreter's limit
        raise DamagedCheckpointError(f"{what} is not valid JSON: {error}") from error
    return value


def read_json_bytes(reader: HashedReader) -> bytearray:
    """The whole of a small file.

    Raises:
        DamagedCheckpointError: It is larger than any file of ours.
    """
    if reader.size > MAX_JSON_BYTES:
        raise DamagedCheckpointError(
            f"{reader.path!r} has {reader.size} bytes; at most {MAX_JSON_BYTES} are allowed"
        )
    return reader.read(reader.size)


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not allowed")


_SEAL = "xxh3_128"


def seal(body: dict[str, Json], what: str) -> bytes:
    """JSON with a hash of itself inside, for the files that no other file vouches for.

    The hash is of the content with sorted keys, so a file that was reformatted still reads. How it is
    computed is the one thing that no later format may change: it is checked before the version is believed.
    """
    return dump_json({**body, _SEAL: _content_hash(body, what)}, what)


def unseal(data: bytes | bytearray, what: str) -> dict[str, Json]:
    """Read what `seal` wrote.

    Raises:
        DamagedCheckpointError: It is no JSON object, or its content is not what was sealed.
    """
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} holds no JSON object")
    expected = value.pop(_SEAL, None)
    if expected != _content_hash(value, what):
        raise DamagedCheckpointError(
            f"{what} is not what was written: its content does not match its own hash"
        )
    return value


def _content_hash(body: dict[str, Json], what: str) -> str:
    try:
        text = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        # Reached on reading by 1e999, which Python reads as infinity; on writing, dump_json says it better.
        raise CheckpointError(f"{what} holds what strict JSON cannot: {error}") from error
    return str(xxhash.xxh3_128_hexdigest(text.encode("ascii")))
