"""What every storage must prove: conformance suites for a `FileSystem` and for a `CheckpointIO`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from drivetrain.checkpoint.files import write_atomically, write_file
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem
from drivetrain.checkpoint.format import Snapshot
from drivetrain.checkpoint.io import CheckpointIO
from drivetrain.checkpoint.tensors import DTYPES
from drivetrain.checkpoint.tree import pack
from drivetrain.errors import CheckpointError


def check_file_system(files: FileSystem, directory: str) -> None:
    """Use every operation of a file system as checkpoints do, and compare what comes of it.

    Args:
        files: What is examined.
        directory: An empty place that it may write to; need not exist. What is written stays there.

    Raises:
        AssertionError: Names the behaviour that is missing.
    """
    base = files.absolute(directory)
    for check in (_paths, _files, _directories, _replacing, _moving):
        place = files.join(base, check.__name__.strip("_"))
        files.make_directory(place)
        check(files, place)


def _paths(files: FileSystem, place: str) -> None:
    path = files.join(place, "name")
    _same(files.split(path), (place, "name"), "split takes apart what join put together")
    _same(files.absolute(path), path, "a path that is absolute stays as it is")
    _same(files.kind(path), None, "kind is None where nothing is")
    _same(files.entries(path), {}, "entries is empty where nothing is")
    with _raises(OSError, "open raises OSError where nothing is"):
        files.open(path).close()


def _files(files: FileSystem, place: str) -> None:
    path = files.join(place, "file")
    content = bytes(range(256)) * 3000
    _same(write_file(path, [content[:7], b"", content[7:]], files), len(content), "the size that was written")
    _same(files.kind(path), "file", "the kind of a file")
    source = files.open(path)
    try:
        _same(source.size, len(content), "the size of a file")
        _same(_rest(source.read_into), content, "a file read to its end")
        source.seek(len(content) - 5)
        _same(_rest(source.read_into), content[-5:], "a file read from a position")
        source.seek(3)
        _same(_rest(source.read_into), content[3:], "a file read from an earlier position")
    finally:
        source.close()
    _same(write_file(files.join(place, "empty"), [], files), 0, "the size of an empty file")
    sink = files.create(files.join(place, "aborted"))
    sink.write(memoryview(b"half"))
    sink.abort()
    if not files.renames:
        _same(files.kind(files.join(place, "aborted")), None, "an aborted object is never seen")
    files.delete(path)
    _same(files.kind(path), None, "a deleted file is gone")


def _directories(files: FileSystem, place: str) -> None:
    inner = files.join(files.join(place, "outer"), "inner")
    files.make_directory(inner)
    files.make_directory(inner)  # a second time does no harm
    write_file(files.join(inner, "file"), [b"1"], files)
    files.sync(inner)
    _same(files.entries(place), {"outer": "directory"}, "the entries of a directory")
    _same(files.entries(inner), {"file": "file"}, "the entries of an inner directory")
    _same(files.kind(inner), "directory", "the kind of a directory")
    files.delete(files.join(place, "outer"))
    _same(files.entries(place), {}, "a deleted directory is gone with all that is in it")
    _same(files.kind(files.join(inner, "file")), None, "and its files too")


def _replacing(files: FileSystem, place: str) -> None:
    path = files.join(place, "index")
    for content in (b"first", b"", b"a longer second one"):
        write_atomically(path, [content], files)
        source = files.open(path)
        try:
            _same(_rest(source.read_into), content, "a file that was replaced")
        finally:
            source.close()
    _same(files.entries(place), {"index": "file"}, "nothing is left beside it")


def _moving(files: FileSystem, place: str) -> None:
    old, new = files.join(place, "old"), files.join(place, "new")
    write_file(old, [b"content"], files)
    files.rename(old, new)
    _same(files.entries(place), {"new": "file"}, "a file that was renamed")
    with _raises(OSError, "renaming what is not there raises OSError"):
        files.rename(old, new)
    if files.renames:
        files.make_directory(old)
        write_file(files.join(old, "file"), [b"1"], files)
        files.rename(old, files.join(place, "moved"))
        _same(files.entries(files.join(place, "moved")), {"file": "file"}, "a directory that was renamed")


def check_checkpoint_io(io: CheckpointIO, directory: str, join: Callable[[str, str], str]) -> None:
    """Use every method of a storage as the manager does, and compare what comes of it.

    Args:
        io: What is examined.
        directory: An empty place that it may write to; need not exist. What is written stays there.
        join: Puts a name behind a directory, as `FileSystem.join`.

    Raises:
        AssertionError: Names the behaviour that is missing.
    """
    first, second = join(directory, "first"), join(directory, "second")
    _same(io.list(directory), [], "list is empty where nothing is")
    _same(io.exists(first), False, "nothing exists where nothing is")
    with _raises(DamagedCheckpointError, "load says what is not there"):
        io.load(first)
    io.save(first, everything(1.0))
    io.save(second, everything(2.0))
    _same(sorted(io.list(directory)), ["first", "second"], "list has what was saved")
    _same(
        (io.exists(first), io.exists(join(directory, "third"))), (True, False), "exists tells the two apart"
    )
    for path, value in ((first, 1.0), (second, 2.0)):
        _compare(io.load(path), everything(value), "what is loaded is what was saved")
    with _raises(CheckpointError, "nothing is overwritten"):
        io.save(first, everything(3.0))
    _compare(io.load(first), everything(1.0), "what was to be overwritten is as it was")
    some = io.load(first, groups=("model",))
    _same(list(some.tensors), ["model"], "only the groups that were asked for are read")
    _same(list(some.objects), ["hparams"], "and no object that has the name of another group")
    with _raises(CheckpointError, "a group that is not there is refused"):
        io.load(first, groups=("models",))
    for name in (".hidden", "old.bad"):
        with _raises(CheckpointError, "a name that list would not show is refused"):
            io.save(join(directory, name), everything(1.0))
    io.remove(first)
    _same(io.list(directory), ["second"], "what was removed is gone")
    with _raises(CheckpointError, "what is not there cannot be removed"):
        io.remove(first)
    io.save(first, everything(4.0))
    _compare(io.load(first), everything(4.0), "a name can be used again")


def everything(value: float) -> Snapshot:
    """A small snapshot with every dtype and shape that can be stored; its content tells `value`."""
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
        objects={"state": state, "hparams": {"values": {"hidden": 3}, "unstored": []}},
        progress={"updates": int(value), "epoch": 0},
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
    # As text, because NaN differs from itself.
    return repr((snapshot.objects, snapshot.progress, snapshot.metrics, snapshot.task))


def _bits(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def _rest(read_into: Callable[[memoryview], int]) -> bytes:
    found = bytearray()
    target = bytearray(100_000)
    while count := read_into(memoryview(target)):
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
    raise AssertionError(f"{what}: expected {kind.__name__}, and nothing was raised")
