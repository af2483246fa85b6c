"""Object stores, such as Amazon S3, through fsspec (https://filesystem-spec.readthedocs.io).

An object appears whole or not at all, and nothing else is counted on: there are no directories but what names
have in common, nothing is renamed but by copying and deleting, and only single objects are.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from typing import Any

from drivetrain.checkpoint.client import Client, configuration, connect, implementation
from drivetrain.checkpoint.filesystem import BytesSource, Kind, Sink, Source
from drivetrain.checkpoint.retries import Request, Retry, as_os_error
from drivetrain.checkpoint.uploads import ObjectSink

_KINDS: dict[str, Kind] = {"file": "file", "directory": "directory", "link": "link"}


class RemoteFileSystem:
    """An object store.

    Fit for several threads, and for processes that are forked: each process has a connection of its own.

    Args:
        protocol: fsspec's name of the kind of store, such as "s3".
        options: Of the fsspec file system, such as an endpoint; what is not among them is as fsspec's own
            configuration and the environment say.
        retry: When a request that failed is made again.
        part: Bytes that a large object is sent in at a time; at least 5 MiB for Amazon S3.
        block: Bytes that are read at a time.
        lanes: The most parts, or blocks, of one object that are under way at a time. An object that is being
            written takes up to `lanes + 3` parts of memory, one that is being read up to twice as many blocks
            as lanes.

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
        part: int = 32 << 20,
        block: int = 8 << 20,
        lanes: int = 4,
    ) -> None:
        self.protocol = protocol
        self._kind = implementation(protocol)
        self._options = dict(options or {})
        self._retry = retry or Retry()
        # In fsspec's memory a file is there, and empty, from when it is opened: only one request is atomic.
        self._part = sys.maxsize if protocol == "memory" else part
        self._block = block
        self._lanes = lanes
        self._clients: dict[tuple[int, str], Client] = {}

    def absolute(self, path: str) -> str:
        """See `FileSystem.absolute`."""
        top = f"{path.partition('://')[0]}://"
        return path if path == top else f"{top}{path.removeprefix(top).rstrip('/')}"

    def join(self, directory: str, name: str) -> str:
        """See `FileSystem.join`."""
        return f"{directory}{name}" if directory.endswith("/") else f"{directory}/{name}"

    def split(self, path: str) -> tuple[str, str]:
        """See `FileSystem.split`; above a bucket there is only the scheme."""
        top = f"{path.partition('://')[0]}://"
        parent, _, name = path.removeprefix(top).rpartition("/")
        return f"{top}{parent}", name

    def kind(self, path: str) -> Kind | None:
        """See `FileSystem.kind`."""
        try:
            return _KINDS.get(self._client(path).info(path)["type"], "other")
        except FileNotFoundError:
            return None

    def entries(self, directory: str) -> dict[str, Kind]:
        """See `FileSystem.entries`; asked anew each time."""
        client = self._client(directory)
        own = client.strip(directory)
        try:
            found = client.call("listing", directory, "ls", own, detail=True)
        except FileNotFoundError:
            return {}
        # An object whose name ends with "/", as a console makes for an empty "folder", is listed in itself.
        names = {each["name"].rstrip("/"): _KINDS.get(each["type"], "other") for each in found}
        return {name.rpartition("/")[2]: kind for name, kind in names.items() if name != own.rstrip("/")}

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`; an object that is there already is replaced when this one is finished."""
        return ObjectSink(self._client(path), path, self._part, self._lanes)

    def open(self, path: str) -> Source:
        """See `FileSystem.open`."""
        client = self._client(path)
        info = client.info(path)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if info["size"] is None:
            raise OSError(errno.EPROTO, "the service does not tell the object's size", path)
        if info["size"] <= self._block:
            return BytesSource(_read_small(client, path, info["size"], self._block))
        return _Source(client, path, info["size"], self._block, self._lanes)

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`; none is needed."""

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`; an object is durable when it is finished."""

    def rename(self, old: str, new: str) -> None:
        """See `FileSystem.rename`; of an object only, by copying and deleting it."""
        client = self._client(old)
        client.call("copying", old, "cp_file", client.strip(old), client.strip(new))
        self._delete_object(client, old, client.strip(old))

    def delete(self, path: str) -> None:
        """See `FileSystem.delete`; of a directory one object after the other."""
        client = self._client(path)
        own = client.strip(path)
        is_object = client.info(path)["type"] == "file"
        names = [own] if is_object else client.call("listing", path, "find", own)
        for name in names:
            self._delete_object(client, path, name)

    def _delete_object(self, client: Client, path: str, name: str) -> None:
        request = client.begin("deleting", path, "rm_file", name)
        try:
            request.result()
        except FileNotFoundError:
            if request.tries == 1:  # else it was deleted by a request whose answer was lost
                raise

    def _client(self, path: str) -> Client:
        """This process's own connection, as fsspec is configured now."""
        # Some addresses name a part of the options, such as an account. Those of processes that this one was
        # forked from stay referred to: closing them here would break them there.
        options = {**self._options, **self._kind._get_kwargs_from_urls(path)}
        key = (os.getpid(), repr((options, configuration(self._kind))))
        client = self._clients.get(key)
        if client is None:
            # Two threads may both come here; then one's connection is dropped, which does no harm.
            try:
                fs = connect(self._kind, options)
            except Exception as error:
                raise as_os_error(error, path) from error
            client = self._clients.setdefault(key, Client(fs, self._retry))
        return client


def _read_small(client: Client, path: str, size: int, block: int) -> bytes:
    """An object that fits in a block, in one request: of one that is replaced meanwhile, old or new."""

    def check(content: bytes) -> None:
        if len(content) != size and len(content) != client.info(path)["size"]:
            raise ConnectionResetError(errno.ECONNRESET, f"only {len(content)} bytes came", path)

    if not size:  # nothing can be asked of an empty one
        return b""
    content: bytes = client.call(
        "reading", path, "cat_file", client.strip(path), start=0, end=block, check=check
    )
    return content


class _Source:
    """A large object, read in blocks; the longer it is read in order, the more of them are asked ahead."""

    def __init__(self, client: Client, path: str, size: int, block: int, lanes: int) -> None:
        self.size = size
        self._client = client
        self._path = path
        self._block = block
        self._most = lanes - 1 if client.overlaps else 0
        self._ahead = 0
        self._position = 0
        self._current = (-1, memoryview(b""))
        self._under_way: dict[int, Request[bytes]] = {}

    def read_into(self, target: memoryview) -> int:
        if self._position >= self.size:
            return 0
        number, offset = divmod(self._position, self._block)
        if number != self._current[0]:
            self._move_to(number)
        found = self._current[1][offset : offset + len(target)]
        target[: len(found)] = found
        self._position += len(found)
        return len(found)

    def seek(self, position: int) -> None:
        self._position = position

    def close(self) -> None:
        self._drop(())
        self._current = (-1, memoryview(b""))

    def _move_to(self, number: int) -> None:
        in_order = number == self._current[0] + 1
        self._ahead = min(self._most, 2 * self._ahead + 1) if in_order and number else 0
        last = min(number + self._ahead, (self.size - 1) // self._block)
        wanted = range(number, last + 1)
        self._drop(wanted)
        self._current = (-1, memoryview(b""))  # its memory is needed for the next
        for each in wanted:
            if each not in self._under_way:
                self._under_way[each] = self._ask(each)
        content = self._under_way.pop(number).result()
        self._current = (number, memoryview(content))

    def _ask(self, number: int) -> Request[bytes]:
        start = number * self._block
        end = min(start + self._block, self.size)

        def check(content: bytes) -> None:
            if len(content) != end - start:
                text = f"only {len(content)} of {end - start} bytes came"
                raise ConnectionResetError(errno.ECONNRESET, text, self._path)

        return self._client.begin(
            "reading",
            self._path,
            "cat_file",
            self._client.strip(self._path),
            start=start,
            end=end,
            check=check,
        )

    def _drop(self, wanted: range | tuple[()]) -> None:
        for number in [each for each in self._under_way if each not in wanted]:
            self._under_way.pop(number).cancel()
