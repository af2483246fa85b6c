"""What checkpoints need of a `FileSystem` and of a `CheckpointIO`."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tensors import DTYPES
from drivetrain.checkpoint.format.tree import pack
from drivetrain.checkpoint.saving.io import SMALL, CheckpointIO
from drivetrain.checkpoint.storage.files import write_atomically, write_file
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem
from drivetrain.core.errors import CheckpointError


def check_file_system(files: FileSystem, directory: str) -> None:
    """Check every operation of a file system in the way that checkpoints use it."""
    base = files.absolute(directory)
    for check in (_paths, _files, _directories, _replacing, _moving):
        place = files.join(base, check.__name__.strip("_"))
        files.make_directory(place)
        check(files, place)


def _paths(files: FileSystem, place: str) -> None:
    path = files.join(place, "name")
    _same(files.split(path), (place, "name"), "split undoes join")
    _same(files.absolute(path), path, "absolute leaves an absolute path unchanged")
    _same(files.kind(path), None, "kind of a missing path is None")
    _same(files.entries(path), {}, "entries of a missing directory is empty")
    with _raises(OSError, "open of a missing file raises OSError"):
        files.open(path).close()


def _files(files: FileSystem, place: str) -> None:
    path = files.join(place, "file")
    content = bytes(range(256)) * 3000
    _same(
        write_file(path, [content[:7], b"", content[7:]], files), len(content), "write_file returns the size"
    )
    _same(files.kind(path), "file", "the kind of a file")
    source = files.open(path)
    try:
        _same(source.seek(0, io.SEEK_END), len(content), "the size of a file")
        source.seek(0)
        _same(_rest(source.readinto), content, "a file read to its end")
        source.seek(len(content) - 5)
        _same(_rest(source.readinto), content[-5:], "a file read from a position")
        source.seek(3)
        _same(_rest(source.readinto), content[3:], "a file read from an earlier position")
    finally:
        source.close()
    _same(write_file(files.join(place, "empty"), [], files), 0, "the size of an empty file")
    sink = files.create(files.join(place, "aborted"))
    sink.write(memoryview(b"half"))
    sink.abort()
    if not files.renames:
        _same(files.kind(files.join(place, "aborted")), None, "an aborted object is never visible")
    files.delete(path)
    _same(files.kind(path), None, "a deleted file is gone")


def _directories(files: FileSystem, place: str) -> None:
    inner = files.join(files.join(place, "outer"), "inner")
    files.make_directory(inner)
    files.make_directory(inner)  # a second call succeeds
    write_file(files.join(inner, "file"), [b"1"], files)
    files.sync(inner)
    _same(files.entries(place), {"outer": "directory"}, "the entries of a directory")
    _same(files.entries(inner), {"file": "file"}, "the entries of an inner directory")
    _same(files.kind(inner), "directory", "the kind of a directory")
    files.delete(files.join(place, "outer"))
    _same(files.entries(place), {}, "a deleted directory is gone")
    _same(files.kind(files.join(inner, "file")), None, "the files of a deleted directory are gone")


def _replacing(files: FileSystem, place: str) -> None:
    path = files.join(place, "index")
    for content in (b"first", b"", b"a longer second one"):
        write_atomically(path, [content], files)
        source = files.open(path)
        try:
            _same(_rest(source.readinto), content, "a file that was replaced")
        finally:
            source.close()
    _same(files.entries(place), {"index": "file"}, "an atomic write leaves no other file")


def _moving(files: FileSystem, place: str) -> None:
    old, new = files.join(place, "old"), files.join(place, "new")
    write_file(old, [b"content"], files)
    files.rename(old, new)
    _same(files.entries(place), {"new": "file"}, "a file that was renamed")
    with _raises(OSError, "renaming a missing file raises OSError"):
        files.rename(old, new)
    if files.renames:
        files.make_directory(old)
        write_file(files.join(old, "file"), [b"1"], files)
        files.rename(old, files.join(place, "moved"))
        _same(files.entries(files.join(place, "moved")), {"file": "file"}, "a directory that was renamed")


def check_checkpoint_io(io: CheckpointIO, directory: str, join: Callable[[str, str], str]) -> None:
    """Check every method of a storage in the way that the checkpoint manager uses it."""
    first, second = join(directory, "first"), join(directory, "second")
    _same(io.list(directory), [], "list of a missing directory is empty")
    _same(io.exists(first), False, "exists is False for a missing checkpoint")
    with _raises(DamagedCheckpointError, "load of a missing checkpoint raises"):
        io.load(first)
    io.save(first, everything(1.0))
    io.save(second, everything(2.0))
    _same(sorted(io.list(directory)), ["first", "second"], "list returns the saved checkpoints")
    _same(
        (io.exists(first), io.exists(join(directory, "third"))),
        (True, False),
        "exists is True for a saved checkpoint alone",
    )
    for path, value in ((first, 1.0), (second, 2.0)):
        _compare(io.load(path), everything(value), "load returns the saved snapshot")
    with _raises(CheckpointError, "save refuses to overwrite a checkpoint"):
        io.save(first, everything(3.0))
    _compare(io.load(first), everything(1.0), "a refused save leaves the checkpoint unchanged")
    some = io.load(first, groups=("model",))
    _same(list(some.tensors), ["model"], "load reads only the requested groups")
    _same(list(some.objects), ["hparams", "large"], "load leaves out the objects of other groups")
    with _raises(CheckpointError, "load of a missing group raises"):
        io.load(first, groups=("models",))
    for name in (".hidden", "old.bad"):
        with _raises(CheckpointError, "save refuses a name that list would not return"):
            io.save(join(directory, name), everything(1.0))
    io.remove(first)
    _same(io.list(directory), ["second"], "a removed checkpoint is gone")
    with _raises(CheckpointError, "removing a missing checkpoint raises"):
        io.remove(first)
    io.save(first, everything(4.0))
    _compare(io.load(first), everything(4.0), "the name of a removed checkpoint can be used again")


def everything(value: float) -> Snapshot:
    """Return a small snapshot with every dtype and kind of shape that can be stored, filled with `value`."""
    tensors: dict[str, Tensor] = {
        f"of {code}": torch.full((3, 2), value, dtype=torch.float32).to(dtype)
        for code, dtype in DTYPES.items()
    }
    tensors["scalar"] = torch.tensor(value)
    tensors["empty"] = torch.empty(0, 4)
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).t() * value
    tensors["nan"] = torch.tensor([math.nan, math.inf, -0.0])
    state, state_tensors = pack({"rates": (0.1, value), "generator": torch.full((5,), value)})
    return Snapshot(
        tensors={
            "model": tensors,
            "optimizer": {"strided/exp_avg": torch.ones(4, 3)},
            "state": state_tensors,
        },
        objects={
            "state": state,
            "hparams": {"values": {"hidden": 3}, "unstored": []},
            "large": "x" * (SMALL + 1),  # has a file of its own
        },
        progress={"steps": int(value), "epoch": 0},
        metrics={"validation/loss": value, "train/loss": math.nan},
        task="Everything",
    )


def _compare(found: Snapshot, expected: Snapshot, what: str) -> None:
    names = {group: list(tensors) for group, tensors in expected.tensors.items()}
    _same({group: list(tensors) for group, tensors in found.tensors.items()}, names, what)
    for group, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            other = found.tensors[group][name]
            _same((other.dtype, other.shape), (tensor.dtype, tensor.shape), f"{what}: {group}/{name}")
            _same(_bits(other), _bits(tensor), f"{what}: {group}/{name}")
    _same(_rest_of(found), _rest_of(expected), what)


def _rest_of(snapshot: Snapshot) -> str:
    # Compared as text, because NaN differs from itself.
    return repr((snapshot.objects, snapshot.progress, snapshot.metrics, snapshot.task))


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def _rest(readinto: Callable[[memoryview], int | None]) -> bytes:
    found = bytearray()
    target = bytearray(100_000)
    while count := readinto(memoryview(target)):
        found += target[:count]
    return bytes(found)


def _same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: expected {_short(expected)}, found {_short(found)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


@contextmanager
def _raises(kind: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what}: expected {kind.__name__}, but nothing was raised")
