"""Files of `torch.save`, read without unpickling them: nothing that such a file names is imported or called.

Such a file is a zip archive (torch/csrc/jit/serialization, "inline_container"): `data.pkl` describes objects,
and `data/<key>` holds the numbers of one storage each. The description is a program for a machine with a
stack, of which the part that builds lists, mappings and numbers is carried out here; whatever it says to
import or to call becomes a `Foreign`, which does nothing.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.checkpoint.tensors import DTYPES, bytes_of
from drivetrain.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}

_BLOCK = 1 << 24
_MAX_PROGRAM = 1 << 30
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING"),
        *("SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": list,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False, slots=True)
class Foreign:
    """Something that a file says to import, or to call: its name, and what it would be called with.

    Attributes:
        name: Module and name, with a dot between them.
        args: What it is called with; None if it is only named.
        state: What is to be put into it afterwards.
    """

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    size: int


class StoredTensor(NamedTuple):
    """A tensor in an archive; `TorchArchive.read` gives its numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of its numbers."""
        return self.storage.dtype

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class TorchArchive:
    """A file of `torch.save` that is being read.

    Attributes:
        path: The file.
        content: What was saved: lists, tuples, mappings, texts and numbers as they are, a tensor as a
            `StoredTensor`, and anything else as a `Foreign`.

    Args:
        path: The file, on a disk.

    Raises:
        DamagedCheckpointError: It is no such file, or not a whole one.
        CheckpointError: It cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with self._told():
            self._zip = zipfile.ZipFile(path)
        self._last: tuple[_Storage, Tensor] | None = None
        try:
            with self._told():
                self._root = self._find_root()
                self.content = _run(self._read_program())
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def read(self, stored: StoredTensor) -> Tensor:
        """The numbers of a tensor, whose bytes are compared with the archive's checksum.

        Raises:
            DamagedCheckpointError: They are not what was written.
        """
        with self._told():
            return self._view(stored, self._read_storage(stored.storage))

    def _view(self, stored: StoredTensor, numbers: Tensor) -> Tensor:
        reach = stored.offset + sum(
            (size - 1) * step for size, step in zip(stored.shape, stored.stride, strict=True)
        )
        if stored.elements and (stored.elements > numbers.numel() or reach >= numbers.numel()):
            raise _MalformedError(f"a tensor of shape {list(stored.shape)} leads out of its storage")
        if not stored.elements:
            return numbers.new_empty(stored.shape)
        return numbers.as_strided(stored.shape, stored.stride, stored.offset)

    def _read_storage(self, storage: _Storage) -> Tensor:
        if self._last is None or self._last[0] != storage:  # tensors that share one often stand in a row
            self._last = storage, self._numbers(storage)
        return self._last[1]

    def _numbers(self, storage: _Storage) -> Tensor:
        entry = self._entry(f"data/{storage.key}")
        if entry.file_size != storage.size * storage.dtype.itemsize:
            raise _MalformedError(
                f"the storage {storage.key!r} has {entry.file_size} bytes for {storage.size} numbers of"
                f" {storage.dtype}"
            )
        numbers = torch.empty(storage.size, dtype=storage.dtype)
        if not storage.size:
            return numbers
        room = bytes_of(numbers)
        filled = 0
        with self._zip.open(entry) as stream:
            while filled < len(room):  # with the last of it the checksum is compared
                data = stream.read(_BLOCK)
                if not data:
                    raise _MalformedError(f"the storage {storage.key!r} ends early")
                room[filled : filled + len(data)] = data
                filled += len(data)
        return numbers

    def _find_root(self) -> str:
        ends = [name for name in self._zip.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(ends) != 1:
            raise _MalformedError("it has no data.pkl, which describes what was saved")
        root = ends[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in self._zip.namelist() and self._zip.read(self._entry("byteorder", root)) != b"little":
            raise _MalformedError("its numbers are not little-endian")
        return root

    def _entry(self, name: str, root: str | None = None) -> zipfile.ZipInfo:
        try:
            entry = self._zip.getinfo(f"{self._root if root is None else root}{name}")
        except KeyError:
            raise _MalformedError(f"it lacks {name}") from None
        if entry.compress_type != zipfile.ZIP_STORED:  # torch compresses nothing; a bomb does
            raise _MalformedError(f"{name} is compressed")
        return entry

    def _read_program(self) -> bytes:
        entry = self._entry("data.pkl")
        if entry.file_size > _MAX_PROGRAM:
            raise _MalformedError(f"its data.pkl has {entry.file_size} bytes")
        return self._zip.read(entry)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors as ours, with the file's name."""
        try:
            yield
        except (zipfile.BadZipFile, EOFError, _MalformedError) as error:
            raise DamagedCheckpointError(
                f"{self.path!r} is not what torch.save writes, or not all of it: {error}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path!r}: {error}") from error


class _MalformedError(Exception):
    """What is wrong with a file, in words."""


def _run(program: bytes) -> Any:
    """What a program describes."""
    machine = _Machine()
    try:
        for code, argument, _ in pickletools.genops(program):
            if code.name == "STOP":
                return machine.pop()
            machine.step(code.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _MalformedError(f"its data.pkl makes no sense ({error})") from error
    raise _MalformedError("its data.pkl has no end")


@dataclass(slots=True)
class _Machine:
    """The stack machine; where an instruction meets something else than it should, Python's errors say so."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        return self.stack.pop()

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def step(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in _LITERALS:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in _EMPTY:
            push(_EMPTY[name]())
        elif name in _TUPLES:
            push(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            push(list(self.since_mark()) if name == "LIST" else tuple(self.since_mark()))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            push(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "POP":
            self.pop()
        elif name == "POP_MARK":
            self.since_mark()
        elif name not in ("PROTO", "FRAME"):
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name == "GLOBAL":
            push(Foreign(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            member, module = self.pop(), self.pop()
            push(Foreign(f"{module}.{member}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = self.pop(), self.pop()
            push(_called(called, args))
        elif name == "NEWOBJ_EX":
            self.pop()
            args, called = self.pop(), self.pop()
            push(_called(called, args))
        elif name == "BINPERSID":
            push(_storage(self.pop()))
        elif name == "BUILD":
            state = self.pop()
            if isinstance(self.stack[-1], Foreign):
                self.stack[-1].state = state
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [self.pop()] if name == "APPEND" else self.since_mark()
            if isinstance(self.stack[-1], list):
                self.stack[-1].extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.since_mark()
            if isinstance(self.stack[-1], dict):
                self.stack[-1].update(_pairs(items))
        else:
            raise _MalformedError(f"its data.pkl has the instruction {name}, which torch.save does not write")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Keys and values in turn, of those keys that can be looked up by."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, (str, int, float, bool, bytes)) or key is None:
            yield key, value


def _called(called: Any, args: Any) -> Any:
    """What a call stands for, as far as that is plain data."""
    if not isinstance(called, Foreign) or not isinstance(args, tuple):
        raise _MalformedError("its data.pkl calls what cannot be called")
    if called.name == _WITH_ATTRIBUTES and args[0].name in _TENSORS:
        called, args = args[0], args[2]
    if called.name == "collections.OrderedDict":
        items = args[0] if args else []
        return dict(_pairs([each for pair in items for each in pair]))
    if called.name == "torch.Size":
        return _sizes(args[0])
    if called.name in _TENSORS:
        storage, offset, shape, stride = args[:4]
        return _tensor(storage, offset, shape, stride)
    if called.name == "torch._utils._rebuild_tensor_v3":
        storage, offset, shape, stride = args[:4]
        dtype = _dtype(args[6])
        size = storage.size * storage.dtype.itemsize
        return _tensor(_Storage(dtype, storage.key, size // dtype.itemsize), offset, shape, stride)
    if called.name in _PARAMETERS:
        return args[0]
    return Foreign(called.name, args)


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value):
        raise _MalformedError("a shape that is no shape")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    shape, stride = _sizes(shape), _sizes(stride)
    if not isinstance(storage, _Storage) or len(shape) != len(stride):
        raise _MalformedError("a tensor without its storage")
    return StoredTensor(storage, _sizes([offset])[0], shape, stride)


def _storage(given: Any) -> _Storage:
    word, kind, key, _, size = given
    name = kind.name.removeprefix("torch.")
    if word != "storage" or not isinstance(key, str) or "/" in key:
        raise _MalformedError("a reference to what is no storage")
    dtype = torch.uint8 if name == "storage.UntypedStorage" else _STORAGES.get(name)
    if dtype is None:
        raise _MalformedError(f"a storage of the kind {name!r}, which is not known")
    return _Storage(dtype, key, _sizes([size])[0])


def _dtype(given: Any) -> torch.dtype:
    dtype = _DTYPES.get(given.name)
    if dtype is None:
        raise _MalformedError("a tensor of an unknown dtype")
    return dtype
