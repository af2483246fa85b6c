"""A file system that fails as it is told to, at a chosen one of its operations.

For proving that what is stored survives: run something over a `FaultyFileSystem` without faults, which counts
the operations; then once for each operation and each kind of fault, and see what is left.
"""

import io
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tests.support.fault_kinds import OPERATIONS, Fault, Killed, Operation, Step, failure, suits
from tests.support.memory import MemoryDisk

from drivetrain.checkpoint.storage.filesystem import ByteSource, FileSystem, Kind, Sink

T = TypeVar("T")


class FaultyFileSystem:
    """A file system on which operations fail: each fault happens once.

    Args:
        root: The directory under which everything happens; needed for a power cut, after which it is put
            into the state that a machine could find after a restart.
    """

    def __init__(self, inner: FileSystem, *faults: Fault, root: str | None = None) -> None:
        self.inner, self.renames = inner, inner.renames
        self.steps: list[Step] = []  # the number of a fault's operation counts these
        self._faults = sorted(faults, key=lambda fault: fault.operation)
        self._dead = self._full = False
        self._lock = threading.Lock()  # a save in the background comes from another thread
        self._twin: _Twin | None = None
        if any(fault.kind == "power cut" for fault in faults):
            assert root is not None, "a power cut needs the root"
            self._twin = _Twin(inner, root)

    def heal(self) -> None:  # free the disk that a fault has filled
        self._full = False

    def struck(self) -> list[Step]:  # the steps that a fault has met
        return [step for step in self.steps if step.fault is not None]

    def absolute(self, path: str) -> str:
        return self.inner.absolute(path)

    def join(self, directory: str, name: str) -> str:
        return self.inner.join(directory, name)

    def split(self, path: str) -> tuple[str, str]:
        return self.inner.split(path)

    def kind(self, path: str) -> Kind | None:
        return self._do("look", path, lambda: self.inner.kind(path))

    def entries(self, directory: str) -> dict[str, Kind]:
        return self._do("look", directory, lambda: self.inner.entries(directory))

    def create(self, path: str) -> Sink:
        return self._do("create", path, lambda: self._create(path))

    def open(self, path: str) -> ByteSource:
        return self._do("open", path, lambda: _FaultySource(self, path, self.inner.open(path)))

    def make_directory(self, path: str) -> None:
        self._do("make directory", path, lambda: self._change(lambda files: files.make_directory(path)))

    def sync(self, directory: str) -> None:
        self._do("sync", directory, lambda: self._change(lambda files: files.sync(directory)))

    def rename(self, old: str, new: str) -> None:
        self._do("rename", old, lambda: self._change(lambda files: files.rename(old, new)))

    def delete(self, path: str) -> None:
        self._do("delete", path, lambda: self._delete(path), lambda chance: self._delete_part(path, chance))

    def _do(
        self,
        operation: Operation,
        path: str,
        act: Callable[[], T],
        act_partly: Callable[[random.Random], object] = lambda chance: None,
    ) -> T:
        """Do something, or let the fault happen that is planned here."""
        fault = self.meet(operation, path)
        if fault is None:
            return act()
        chance = random.Random(fault.seed)
        if fault.kind in ("kill", "power cut"):
            how = chance.randrange(3)
            if how == 1:
                act_partly(chance)
            elif how == 2:
                _let_go(act())
            self.die(fault)
        if fault.kind == "lost answer":
            act()
        else:
            act_partly(chance)
        raise failure(fault.kind, path)

    def meet(self, operation: Operation, path: str) -> Fault | None:
        """Count an operation; the fault that is to happen at it, which happens once."""
        with self._lock:
            if self._dead:
                raise Killed
            number = len(self.steps) + 1
            due = [each for each in self._faults if each.operation <= number]
            fault = next((each for each in due if suits(each.kind, operation, self.renames)), None)
            if self._full and operation in OPERATIONS["full disk"]:
                self.steps.append(Step(operation, path))
                raise failure("full disk", path)
            self.steps.append(Step(operation, path, None if fault is None else fault.kind))
            if fault is not None:
                self._faults.remove(fault)
                self._full = fault.kind == "full disk"
            return fault

    def die(self, fault: Fault) -> None:
        """End this process, and the machine's power with it if the fault says so."""
        self._dead = True
        if fault.kind == "power cut":
            assert self._twin is not None
            self._twin.cut_power(random.Random(fault.seed))
        raise Killed

    def replace(self, path: str, content: bytes | None) -> None:
        self._delete(path)
        if content is not None:
            self._change(lambda files: write_bytes(files, path, content))

    def _change(self, act: Callable[[FileSystem], None]) -> None:
        act(self.inner)
        if self._twin is not None:
            act(self._twin)

    def _create(self, path: str) -> Sink:
        twin = self._twin.create(path) if self._twin is not None else None
        return _FaultySink(self, path, self.inner.create(path), twin)

    def _delete(self, path: str) -> None:
        self._change(lambda files: files.delete(path))

    def _delete_part(self, path: str, chance: random.Random) -> None:  # delete some of what is in a directory
        names = sorted(self.inner.entries(path)) if self.inner.kind(path) == "directory" else []
        for name in chance.sample(names, chance.randint(0, len(names))):
            self._delete(self.inner.join(path, name))


class _FaultySink:
    def __init__(self, files: FaultyFileSystem, path: str, inner: Sink, twin: Sink | None) -> None:
        self._files, self._path, self._inner, self._twin = files, path, inner, twin

    def write(self, data: memoryview) -> int:
        fault = self._files.meet("write", self._path)
        if fault is None:
            return self._store(data)
        chance = random.Random(fault.seed)
        part = data[: chance.randrange(len(data))]
        if fault.kind in ("kill", "power cut"):
            self._store(part)
            self._files.die(fault)
        if fault.kind == "short write":
            return self._store(part or data)
        if fault.kind == "lying write":
            self._store(part)
            return len(data)
        if fault.kind == "flip":
            self._store(memoryview(_flipped(data, chance)))
            return len(data)
        if fault.kind == "full disk":
            self._store(part)
        raise failure(fault.kind, self._path)

    def finish(self) -> None:
        fault = self._files.meet("finish", self._path)
        if fault is None:
            self._finish()
            return
        chance = random.Random(fault.seed)
        if fault.kind in ("kill", "power cut"):
            # An object that is not finished does not appear; of a file, what was written is there.
            self._finish() if chance.randrange(2) else self.abort()
            self._files.die(fault)
        if fault.kind in ("drop", "truncate"):
            self._finish()
            self._spoil(None if fault.kind == "drop" else chance)
            return
        if fault.kind == "lost answer":
            self._finish()
        else:
            self.abort()
        raise failure(fault.kind, self._path)

    def abort(self) -> None:
        # Not counted, and done for the dead too: the system closes their files.
        self._inner.abort()

    def _store(self, data: memoryview) -> int:
        rest = data
        while rest:
            rest = rest[self._inner.write(rest) :]
        if self._twin is not None:
            self._twin.write(data)
        return len(data)

    def _finish(self) -> None:
        self._inner.finish()
        if self._twin is not None:
            self._twin.finish()

    def _spoil(self, chance: random.Random | None) -> None:  # let the finished file vanish, or cut it short
        content = read_bytes(self._files.inner, self._path)
        rest = None if chance is None else content[: chance.randrange(len(content) or 1)]
        self._files.replace(self._path, rest)


class _FaultySource(io.RawIOBase):
    def __init__(self, files: FaultyFileSystem, path: str, inner: ByteSource) -> None:
        self._files, self._path, self._inner = files, path, inner

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int | None:
        fault = self._files.meet("read", self._path)
        if fault is None:
            return self._inner.readinto(target)
        if fault.kind == "kill":
            self._files.die(fault)
        if fault.kind == "flip":
            count = self._inner.readinto(target)
            target[:count] = _flipped(target[:count], random.Random(fault.seed))
            return count
        raise failure(fault.kind, self._path)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._inner.seek(offset, whence)

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Twin(MemoryDisk):
    """What a file system would be after a power cut: a disk that is told everything that is done to it."""

    def __init__(self, inner: FileSystem, root: str) -> None:
        super().__init__()
        self._inner, self._top = inner, root
        if inner.kind(root) == "directory":
            self.make_directory(root)
            _copy(inner, self, root)

    def cut_power(self, chance: random.Random) -> None:
        super().cut_power(chance)
        if self._inner.kind(self._top) is not None:
            self._inner.delete(self._top)
        if self.kind(self._top) is not None:
            self._inner.make_directory(self._top)
            _copy(self, self._inner, self._top)


def _copy(source: FileSystem, target: FileSystem, directory: str) -> None:
    for name, kind in source.entries(directory).items():
        path = source.join(directory, name)
        if kind == "directory":
            target.make_directory(path)
            _copy(source, target, path)
        elif kind == "file":
            write_bytes(target, path, read_bytes(source, path))
    target.sync(directory)


def read_bytes(files: FileSystem, path: str) -> bytes:  # the content of a small file
    source = files.open(path)
    data = bytearray(source.seek(0, io.SEEK_END))
    source.seek(0)
    done = 0
    while done < len(data) and (count := source.readinto(memoryview(data)[done:])):
        done += count
    source.close()
    return bytes(data[:done])


def write_bytes(files: FileSystem, path: str, content: bytes) -> None:
    sink = files.create(path)
    rest = memoryview(content)
    while rest:
        rest = rest[sink.write(rest) :]
    sink.finish()


def _let_go(value: object) -> None:  # close what a process had opened when it died
    if isinstance(value, _FaultySink):
        value.abort()
    elif isinstance(value, _FaultySource):
        value.close()


def _flipped(data: memoryview, chance: random.Random) -> bytearray:  # the same bytes but for one bit
    changed = bytearray(data)
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return changed
