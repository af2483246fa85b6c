"""Object stores, such as Amazon S3, through fsspec (https://filesystem-spec.readthedocs.io).

The only guarantee needed is that an object appears complete or not at all. Directories exist only as common
prefixes of names. Renaming is copying and deleting, and only for single objects.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from drivetrain.checkpoint.storage.filesystem import ByteSource, FileSystem, Kind, Sink
from drivetrain.checkpoint.storage.retries import Retry, as_os_error
from drivetrain.core.errors import CheckpointError, MissingDependencyError, nearest

_KINDS: dict[str, Kind] = {"file": "file", "directory": "directory", "link": "link"}
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3")}
"""Protocols that one of our extras supports: the package, and the extra that installs it."""


class RemoteFileSystem(FileSystem):
    """An object store. Safe to use from several threads and after a fork: each process has its connection.

    Args:
        protocol: fsspec's name of the kind of store, such as "s3".
        options: Options of the fsspec file system, such as an endpoint. All others come from fsspec's
            configuration and the environment.
        retry: The policy for repeating failed requests.
        part: The size in bytes of a multipart upload's parts; for Amazon S3 at least 5 MiB, and at most
            10,000 parts. Writing an object takes a little more than four times this memory.
        block: Bytes per read request; reading an object takes up to three times this memory.

    Raises:
        MissingDependencyError: fsspec, or the package for Amazon S3, is not installed.
        CheckpointError: No such protocol, or its package is not installed.
    """

    renames = False

    def __init__(
        self,
        protocol: str,
        options: Mapping[str, Any] | None = None,
        *,
        retry: Retry | None = None,
        part: int = 48 << 20,
        block: int = 16 << 20,
    ) -> None:
        self.protocol = protocol
        self._kind = _implementation(protocol)
        self._options = dict(options or {})
        self._retry = retry or Retry()
        # In fsspec's memory file system an opened file exists at once, empty: only one request is atomic.
        self._part = sys.maxsize if protocol == "memory" else part
        self._block = block
        self._connections: dict[tuple[int, str], Any] = {}

    def absolute(self, path: str) -> str:
        top = f"{path.partition('://')[0]}://"
        return path if path == top else f"{top}{path.removeprefix(top).rstrip('/')}"

    def join(self, directory: str, name: str) -> str:
        return f"{directory}{name}" if directory.endswith("/") else f"{directory}/{name}"

    def split(self, path: str) -> tuple[str, str]:
        """See `FileSystem.split`; above a bucket there is only the scheme."""
        top = f"{path.partition('://')[0]}://"
        parent, _, name = path.removeprefix(top).rpartition("/")
        return f"{top}{parent}", name

    def kind(self, path: str) -> Kind | None:
        try:
            return _KINDS.get(self._info(path)["type"], "other")
        except FileNotFoundError:
            return None

    def entries(self, directory: str) -> dict[str, Kind]:
        """See `FileSystem.entries`; never cached."""
        own = self._strip(directory)
        try:
            found = self._call("listing", directory, "ls", own, detail=True)
        except FileNotFoundError:
            return {}
        # An object whose name ends with "/", which a console creates for an empty "folder", lists itself.
        names = {each["name"].rstrip("/"): _KINDS.get(each["type"], "other") for each in found}
        return {name.rpartition("/")[2]: kind for name, kind in names.items() if name != own.rstrip("/")}

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`; an existing object is replaced when this one is finished."""
        return _ObjectSink(self._connection(path), path, self._strip(path), self._part, self._retry)

    def open(self, path: str) -> ByteSource:
        info = self._info(path)
        size = info["size"]
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if size is None:
            raise OSError(errno.EPROTO, "the service does not tell the object's size", path)

        def check(content: bytes) -> None:
            # If the object is replaced between the two requests, this reads the complete old or new one.
            if len(content) != size and len(content) != self._info(path)["size"]:
                raise _short(len(content), size)

        if not size:  # an empty object has no range to request
            return io.BytesIO()
        if size <= self._block:
            return io.BytesIO(self._read(path, 0, self._block, check))
        return _ObjectSource(self, path, size, self._block)

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Return a range of an object's bytes; fewer bytes than asked for count as a failure."""

        def check(content: bytes) -> None:
            if len(content) != end - start:
                raise _short(len(content), end - start)

        return self._read(path, start, end, check)

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`; none is needed."""

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`; an object is durable when it is finished."""

    def rename(self, old: str, new: str) -> None:
        """See `FileSystem.rename`; for objects only, by copying and deleting."""
        self._call("copying", old, "cp_file", self._strip(old), self._strip(new))
        self._delete_object(old, self._strip(old))

    def delete(self, path: str) -> None:
        """See `FileSystem.delete`; a directory is deleted object by object."""
        own = self._strip(path)
        is_object = self._info(path)["type"] == "file"
        for name in [own] if is_object else self._call("listing", path, "find", own):
            self._delete_object(path, name)

    def _delete_object(self, path: str, name: str) -> None:
        def request() -> None:
            with suppress(FileNotFoundError):  # an earlier request, whose answer was lost, has deleted it
                self._connection(path).rm_file(name)

        self._retry.call("deleting", path, request)

    def _read(self, path: str, start: int, end: int, check: Callable[[bytes], None]) -> bytes:
        name = self._strip(path)
        content: bytes = self._call("reading", path, "cat_file", name, start=start, end=end, check=check)
        return content

    def _info(self, path: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call("looking at", path, "info", self._strip(path))
        return found

    def _call(
        self,
        what: str,
        path: str,
        method: str,
        *arguments: Any,
        check: Callable[[Any], None] | None = None,
        **named: Any,
    ) -> Any:
        """Call a method of the fsspec file system; `check` raises if the result cannot be used."""

        def request() -> Any:
            found = getattr(self._connection(path), method)(*arguments, **named)
            if check is not None:
                check(found)
            return found

        return self._retry.call(what, path, request)

    def _strip(self, path: str) -> str:
        """Return fsspec's form of the path, without the scheme."""
        return str(self._kind._strip_protocol(path))

    def _connection(self, path: str) -> Any:
        """Return this process's fsspec file system, for fsspec's present configuration."""
        # Some addresses contain options, such as an account. Connections of the processes that this one was
        # forked from stay referenced: closing them here would break them there.
        options = {**self._options, **self._kind._get_kwargs_from_urls(path)}
        key = (os.getpid(), repr((options, _configuration(self._kind))))
        fs = self._connections.get(key)
        if fs is None:
            # If two threads get here, one connection is dropped, which does no harm.
            with _os_errors(path):
                fs = _connect(self._kind, options, self._retry)
            fs = self._connections.setdefault(key, fs)
        return fs


def _short(found: int, size: int) -> OSError:
    return ConnectionResetError(errno.ECONNRESET, f"only {found} of {size} bytes came")


class _ObjectSource(io.RawIOBase):
    """A large object, read in blocks."""

    def __init__(self, files: RemoteFileSystem, path: str, size: int, block: int) -> None:
        self._size = size
        self._files = files
        self._path = path
        self._block = block
        self._position = 0
        self._number = -1
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        if self._position >= self._size:
            return 0
        number, offset = divmod(self._position, self._block)
        if number != self._number:
            self._content = memoryview(b"")  # free the memory for the next block
            start = number * self._block
            end = min(start + self._block, self._size)
            self._content = memoryview(self._files.read_range(self._path, start, end))
            self._number = number
        found = self._content[offset : offset + len(target)]
        target[: len(found)] = found
        self._position += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def close(self) -> None:
        self._number, self._content = -1, memoryview(b"")
        super().close()


class _ObjectSink:
    """An object that is being written: in one request if it fits in a part, else through a file of fsspec."""

    def __init__(self, fs: Any, path: str, name: str, part: int, retry: Retry) -> None:
        self._fs = fs
        self._path = path
        self._name = name
        self._part = part
        self._retry = retry
        self._size = 0
        self._held = io.BytesIO()
        self._file: Any = None

    def write(self, data: memoryview) -> int:
        if self._file is None and self._held.tell() + len(data) > self._part:
            self._begin()
        target = self._held if self._file is None else self._file
        with _os_errors(self._path):
            taken: int = target.write(data)
        self._size += taken
        return taken

    def finish(self) -> None:
        if self._file is None:
            content = self._held.getvalue()
            self._retry.call("writing", self._path, lambda: self._fs.pipe_file(self._name, content))
            return
        try:
            with _os_errors(self._path):
                self._file.close()
                self._commit()
        except BaseException:
            with suppress(OSError):  # the first error is already propagating
                self.abort()
            raise

    def abort(self) -> None:
        self._held = io.BytesIO()
        if self._file is not None:
            # Otherwise Python's garbage collector would finish the file.
            with suppress(AttributeError):
                self._file.closed = True
            self._retry.call("aborting", self._path, self._file.discard)

    def _begin(self) -> None:
        with _os_errors(self._path):
            # As in fsspec's transactions, the file does not exist until it is committed.
            self._file = self._fs.open(self._name, "wb", block_size=self._part, autocommit=False)
            self._file.write(self._held.getbuffer())
        self._held = io.BytesIO()

    def _commit(self) -> None:
        try:
            self._file.commit()
        except FileNotFoundError:
            # No such upload: an earlier request, whose answer was lost, may have completed it.
            with suppress(OSError):
                if self._fs.info(self._name)["size"] == self._size:
                    return
            raise


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Run the block with the errors of a client package turned into `OSError`s."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise as_os_error(error, path) from error


def _implementation(protocol: str) -> Any:
    """Return fsspec's file system class for a protocol, such as "s3"."""
    purpose = f"an address that begins with '{protocol}://'"
    package, extra = _EXTRAS.get(protocol, ("fsspec", "remote"))
    try:
        from fsspec import available_protocols, get_filesystem_class
    except ImportError as error:
        raise MissingDependencyError(package, extra, purpose) from error
    try:
        return get_filesystem_class(protocol)
    except ValueError as error:
        raise CheckpointError(
            f"unknown kind of address '{protocol}://'. {nearest(protocol, available_protocols())}"
        ) from error
    except ImportError as error:
        if protocol in _EXTRAS:
            raise MissingDependencyError(package, extra, purpose) from error
        raise CheckpointError(f"{purpose} needs a package that is not installed: {error}") from error


def _connect(kind: Any, options: Mapping[str, Any], retry: Retry) -> Any:
    """Return a new fsspec file system: not shared, and without a cache of listings."""
    from fsspec.config import apply_config

    settings = apply_config(kind, dict(options))
    settings.update(use_listings_cache=False, skip_instance_cache=True)
    if not hasattr(kind, "call_s3"):
        return kind(**settings)

    class PatientS3(kind):  # type: ignore[misc]
        """s3fs's file system, with our retries for each part of an upload."""

        retries = 1

        def call_s3(self, method: str, *arguments: Any, **named: Any) -> Any:
            path = f"s3://{named.get('Bucket')}/{named.get('Key')}"
            return retry.call(
                "writing", path, lambda: super(PatientS3, self).call_s3(method, *arguments, **named)
            )

    # One try each: the client's retries would multiply with ours, and draw from the run's random numbers.
    settings["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **settings.get("config_kwargs", {})}
    return PatientS3(**settings)


def _configuration(kind: Any) -> str:
    """Return fsspec's configuration of a file system class, as a text that changes with it."""
    from fsspec.config import conf

    names = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    return repr([conf.get(name) for name in names])
