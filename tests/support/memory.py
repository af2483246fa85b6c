"""File systems in memory: a disk that a power cut takes at its word, and an object store."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from drivetrain.checkpoint.storage.filesystem import SAVING, ByteSource, Kind, Sink


@dataclass(eq=False, slots=True)
class _File:  # A file: its content, and what of it is surely on the medium, None for nothing
    content: bytes = b""
    durable: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Change:  # A change of a directory's names: one goes, or one comes, or both, as when a file is renamed
    old: str | None
    new: str | None
    node: _Node

    def apply(self, names: dict[str, _Node]) -> None:
        if self.old is not None:
            names.pop(self.old, None)
        if self.new is not None:
            names[self.new] = self.node


@dataclass(eq=False, slots=True)
class _Directory:
    """A directory: its names, those that are surely on the medium, and what has changed in between."""

    names: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: _Node) -> None:
        change = _Change(old, new, node)
        change.apply(self.names)
        self.pending.append(change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()


_Node: TypeAlias = _File | _Directory


class MemoryDisk:
    """A POSIX disk in memory, for one process, that can have its power cut.

    It promises no more than POSIX does: the content of a file is durable once the file is finished, a name
    once its directory is synced. Of everything else a power cut keeps what chance likes.
    """

    renames = True

    def __init__(self) -> None:
        self._root = _Directory()

    def absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join("/", path))

    def join(self, directory: str, name: str) -> str:
        return posixpath.join(directory, name)

    def split(self, path: str) -> tuple[str, str]:
        return posixpath.split(path)

    def kind(self, path: str) -> Kind | None:
        node = self._find(path)
        if node is None:
            return None
        return "file" if isinstance(node, _File) else "directory"

    def entries(self, directory: str) -> dict[str, Kind]:
        node = self._find(directory)
        if not isinstance(node, _Directory):
            return {}
        return {name: "file" if isinstance(each, _File) else "directory" for name, each in node.names.items()}

    def create(self, path: str) -> Sink:
        parent, name = self._parent(path)
        if name in parent.names:
            raise _os_error(errno.EEXIST, path)
        file = _File()
        parent.change(None, name, file)
        return _DiskSink(file)

    def open(self, path: str) -> ByteSource:
        node = self._find(path)
        if not isinstance(node, _File):
            raise _os_error(errno.ENOENT if node is None else errno.EISDIR, path)
        return io.BytesIO(node.content)

    def make_directory(self, path: str) -> None:
        directory, is_unfinished = self._root, False
        for name in _parts(path):
            node = directory.names.get(name)
            is_unfinished = is_unfinished or name.startswith(SAVING)
            if node is None:
                node = _Directory()
                directory.change(None, name, node)
                if not is_unfinished:  # as on a local disk
                    directory.sync()
            if not isinstance(node, _Directory):
                raise _os_error(errno.ENOTDIR, path)
            directory = node

    def sync(self, directory: str) -> None:
        node = self._find(directory)
        if not isinstance(node, _Directory):
            raise _os_error(errno.ENOENT, directory)
        node.sync()

    def rename(self, old: str, new: str) -> None:
        (source, old_name), (target, new_name) = self._parent(old), self._parent(new)
        node, replaced = source.names.get(old_name), target.names.get(new_name)
        if node is None:
            raise _os_error(errno.ENOENT, old)
        if isinstance(replaced, _Directory) and (replaced.names or isinstance(node, _File)):
            raise _os_error(errno.ENOTEMPTY if isinstance(node, _Directory) else errno.EISDIR, new)
        if source is target:
            source.change(old_name, new_name, node)
        else:
            target.change(None, new_name, node)
            source.change(old_name, None, node)

    def delete(self, path: str) -> None:
        parent, name = self._parent(path)
        node = parent.names.get(name)
        if node is None:
            raise _os_error(errno.ENOENT, path)
        if isinstance(node, _Directory):
            for inner in list(node.names):
                self.delete(posixpath.join(path, inner))
        parent.change(name, None, node)

    def cut_power(self, chance: random.Random) -> None:
        """Lose what is not durable, or keep it, or tear it, as `chance` decides among what POSIX allows."""
        self._forget(self._root, chance)

    def _forget(self, directory: _Directory, chance: random.Random) -> None:
        names = dict(directory.durable)
        for change in _survivors(directory.pending, chance):
            change.apply(names)
        directory.names = names
        directory.sync()
        for node in names.values():
            if isinstance(node, _Directory):
                self._forget(node, chance)
                continue
            if node.durable is None:
                node.content = _torn(node.content, chance)
            node.durable = node.content

    def _find(self, path: str) -> _Node | None:
        node: _Node = self._root
        for name in _parts(path):
            if not isinstance(node, _Directory) or name not in node.names:
                return None
            node = node.names[name]
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, name = posixpath.split(path)
        node = self._find(parent)
        if not isinstance(node, _Directory):
            raise _os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node, name


class MemoryObjects:
    """An object store in memory: whole objects by key, which appear when finished, and nothing else."""

    renames = False

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def absolute(self, path: str) -> str:
        return path

    def join(self, directory: str, name: str) -> str:
        return f"{directory}/{name}"

    def split(self, path: str) -> tuple[str, str]:
        parent, _, name = path.rpartition("/")
        return parent, name

    def kind(self, path: str) -> Kind | None:
        if path in self._objects:
            return "file"
        return "directory" if any(self._inside(path)) else None

    def entries(self, directory: str) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        for key in self._inside(directory):
            name, deeper, _ = key.removeprefix(f"{directory}/").partition("/")
            found[name] = "directory" if deeper else "file"
        return found

    def create(self, path: str) -> Sink:
        return _ObjectSink(self._objects, path)

    def open(self, path: str) -> ByteSource:
        if path not in self._objects:
            raise _os_error(errno.ENOENT, path)
        return io.BytesIO(self._objects[path])

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`; there is nothing to do."""

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`; there is nothing to do."""

    def rename(self, old: str, new: str) -> None:
        if old not in self._objects:
            raise _os_error(errno.ENOENT, old)
        self._objects[new] = self._objects.pop(old)

    def delete(self, path: str) -> None:
        doomed = [path] if path in self._objects else list(self._inside(path))
        if not doomed:
            raise _os_error(errno.ENOENT, path)
        for key in doomed:
            del self._objects[key]

    def _inside(self, directory: str) -> Iterator[str]:
        return (key for key in self._objects if key.startswith(f"{directory}/"))


class _DiskSink:
    def __init__(self, file: _File) -> None:
        self._file = file

    def write(self, data: memoryview) -> int:
        self._file.content += bytes(data)
        return len(data)

    def finish(self) -> None:
        self._file.durable = self._file.content

    def abort(self) -> None:
        pass


class _ObjectSink:
    def __init__(self, objects: dict[str, bytes], key: str) -> None:
        self._objects = objects
        self._key = key
        self._content = b""

    def write(self, data: memoryview) -> int:
        self._content += bytes(data)
        return len(data)

    def finish(self) -> None:
        self._objects[self._key] = self._content

    def abort(self) -> None:
        pass


def _survivors(changes: list[_Change], chance: random.Random) -> list[_Change]:
    """Which of a directory's changes since it was synced have reached the medium all the same."""
    fate = chance.choice(("none", "all", "first", "some"))
    if fate == "first":
        return changes[: chance.randint(0, len(changes))]
    return [each for each in changes if fate == "all" or (fate == "some" and chance.random() < 0.5)]


def _torn(content: bytes, chance: random.Random) -> bytes:
    """What a power cut leaves of an unfinished file: its length is often written before its content."""
    length = chance.randint(0, len(content))
    return chance.choice((b"", content[:length], content[:length] + bytes(len(content) - length), content))


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _os_error(code: int, path: str) -> OSError:
    return OSError(code, os.strerror(code), path)
