"""Read `torch.save` files without unpickling them: nothing that a file names is imported or called.

The file is a zip archive (torch/csrc/jit/serialization, "inline_container"): `data.pkl` describes objects,
and each `data/<key>` has the numbers of one storage. The description is a program for a stack machine. This
module executes the instructions that build lists, mappings and numbers; imports and calls become a `Foreign`,
which does nothing. docs/explanation/design-notes.md says why this is not `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint.format.tensors import DTYPES, bytes_of
from drivetrain.checkpoint.storage.filesystem import (
    LOCAL,
    DamagedCheckpointError,
    FileSystem,
    os_errors,
)

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
    "storage.UntypedStorage": torch.uint8,
}
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_BLOCK = 1 << 24

_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}


@dataclass(eq=False, slots=True)
class Foreign:
    """An import or a call in a file, recorded and not executed.

    Attributes:
        name: Module and name, with a dot between them.
        args: The arguments of the call; None for an import alone.
        state: The state that the object would get afterwards.
    """

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str
    size: int


class StoredTensor(NamedTuple):
    """A tensor in an archive; `TorchArchive.read` returns its numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class TorchArchive:
    """A `torch.save` file that is being read.

    Attributes:
        path: The file.
        content: The saved object: lists, tuples, mappings, texts and numbers unchanged, tensors as
            `StoredTensor`s, and anything else as a `Foreign`.

    Raises:
        DamagedCheckpointError: The file is not a complete `torch.save` file.
        CheckpointError: The file cannot be read.
    """

    def __init__(self, path: str, files: FileSystem = LOCAL) -> None:
        self.path = path
        self._last: tuple[_Storage, Tensor] | None = None
        with self._errors():
            self._source = files.open(path)
            try:
                self._size = self._source.seek(0, io.SEEK_END)
                self._zip = zipfile.ZipFile(io.BufferedReader(self._source))
                self._root = self._find_root()
                self.content = _run(self._zip.read(self._entry(f"{self._root}data.pkl")))
            except BaseException:
                self._source.close()
                raise

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    def read(self, stored: StoredTensor) -> Tensor:
        """Read a tensor, and check its bytes against the archive's checksum."""
        with self._errors():
            if self._last is None or self._last[0] != stored.storage:  # often shared with the last
                self._last = stored.storage, self._numbers(stored.storage)
            numbers = self._last[1]
            if not stored.elements:
                return numbers.new_empty(stored.shape)
            steps = zip(stored.shape, stored.stride, strict=True)
            reach = stored.offset + sum((size - 1) * step for size, step in steps)
            if stored.elements > numbers.numel() or reach >= numbers.numel():
                raise ValueError(f"a tensor of shape {list(stored.shape)} leads out of its storage")
            return numbers.as_strided(stored.shape, stored.stride, stored.offset)

    def _numbers(self, storage: _Storage) -> Tensor:
        entry = self._entry(f"{self._root}data/{storage.key}")
        if entry.file_size != storage.size * storage.dtype.itemsize:
            raise ValueError(
                f"the storage {storage.key!r} has {entry.file_size} bytes for {storage.size} numbers of"
                f" {storage.dtype}"
            )
        numbers = torch.empty(storage.size, dtype=storage.dtype)
        room = bytes_of(numbers) if storage.size else memoryview(b"")
        with self._zip.open(entry) as stream:
            while room:  # the last read checks the checksum
                data = stream.read(min(_BLOCK, len(room)))
                if not data:
                    raise ValueError(f"the storage {storage.key!r} ends early")
                room[: len(data)] = data
                room = room[len(data) :]
        return numbers

    def _find_root(self) -> str:
        ends = [name for name in self._zip.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(ends) != 1:
            raise ValueError("it has no data.pkl, which describes what was saved")
        root = ends[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in self._zip.namelist() and self._zip.read(self._entry(order)) != b"little":
            raise ValueError("its numbers are not little-endian")
        return root

    def _entry(self, name: str) -> zipfile.ZipInfo:
        try:
            entry = self._zip.getinfo(name)
        except KeyError:
            raise ValueError(f"it lacks {name}") from None
        if entry.compress_type != zipfile.ZIP_STORED:  # torch compresses nothing; a zip bomb does
            raise ValueError(f"{name} is compressed")
        if entry.file_size > self._size:
            raise ValueError(f"{name} claims more bytes than the file has")
        return entry

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Run the block with errors turned into ours, with the file's name."""
        try:
            with os_errors("read", self.path):
                yield
        except _WRONG as error:
            is_told = isinstance(error, (ValueError, RuntimeError, EOFError, zipfile.BadZipFile))
            why = error if is_told else f"its data.pkl makes no sense ({error!r})"
            old = " (torch before 1.6 wrote no zip files)" if "not a zip file" in str(error) else ""
            raise DamagedCheckpointError(
                f"{self.path!r} is not what torch.save writes, or not all of it: {why}{old}"
            ) from error


# Errors of zipfile, of pickletools, and of programs whose instructions do not fit the stack.
_WRONG = (
    *(zipfile.BadZipFile, EOFError, RuntimeError),
    *(ValueError, LookupError, TypeError, AttributeError, OverflowError),
)


def _run(program: bytes) -> Any:
    """Return the value that a program describes, in the instructions of Python's pickle protocols 2 to 5.

    If an instruction does not fit the stack, Python's errors propagate.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def last(count: int) -> list[Any]:
        return [stack.pop() for _ in range(count)][::-1]

    def since_mark() -> list[Any]:
        return last(len(stack) - marks.pop())

    argument: Any
    for code, argument, _ in pickletools.genops(program):
        name = code.name
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(last(int(name[-1]))))
        elif name in ("TUPLE", "FROZENSET"):
            stack.append(tuple(since_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = last(2) if name == "SETITEM" else since_mark()
            if isinstance(stack[-1], dict):
                stack[-1].update(_pairs(items))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = last(1) if name == "APPEND" else since_mark()
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif name == "GLOBAL":
            stack.append(Foreign(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            stack.append(Foreign(".".join(last(2))))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            called, args = last(3)[:2] if name == "NEWOBJ_EX" else last(2)
            stack.append(_called(called, args))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Foreign):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name in ("POP", "POP_MARK"):
            _ = stack.pop() if name == "POP" else since_mark()
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"its data.pkl has the instruction {name}, which torch.save does not write")
    raise ValueError("its data.pkl has no end")


def _pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of keys and values, without keys that are objects: hashing those could take for ever."""
    for key, value in zip(items[::2], items[1::2], strict=True):
        if isinstance(key, (str, int, float, bytes)) or key is None:
            yield key, value


def _called(called: Any, args: Any) -> Any:
    """Return the value of a call if it is plain data, else a `Foreign`."""
    if not isinstance(called, Foreign) or not isinstance(args, tuple):
        raise ValueError("its data.pkl calls what cannot be called")
    name = called.name
    if name == "torch._tensor._rebuild_from_type_v2" and args[0].name in _TENSORS:  # has attributes
        name, args = args[0].name, args[2]
    if name == "collections.OrderedDict":
        return dict(_pairs([each for pair in (args[0] if args else ()) for each in pair]))
    if name == "torch.Size":
        return _sizes(args[0])
    if name in _TENSORS:
        return _tensor(*args[:4])
    if name == "torch._utils._rebuild_tensor_v3":
        storage, dtype = args[0], _DTYPES[args[6].name]
        size = storage.size * storage.dtype.itemsize // dtype.itemsize
        return _tensor(_Storage(dtype, storage.key, size), *args[1:4])
    return args[0] if name in _PARAMETERS else Foreign(name, args)


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value):
        raise ValueError("a shape is invalid")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    shape, stride = _sizes(shape), _sizes(stride)
    if not isinstance(storage, _Storage) or len(shape) != len(stride):
        raise ValueError("a tensor has no storage")
    return StoredTensor(storage, _sizes([offset])[0], shape, stride)


def _storage(given: Any) -> _Storage:
    word, kind, key, _, size = given
    if word != "storage" or not isinstance(key, str) or "/" in key:
        raise ValueError("a reference is not to a storage")
    dtype = _STORAGES.get(kind.name.removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"a storage has the unknown type {kind.name!r}")
    return _Storage(dtype, key, _sizes([size])[0])
