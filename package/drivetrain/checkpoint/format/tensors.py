"""Write safetensors files and hash them in the same pass; read their headers and single tensors.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length of the header,
the header in JSON (name -> dtype, shape, data_offsets), then the tensors' bytes in C order, without gaps. Any
safetensors reader can read these files. A warm start maps plain ones with the `safetensors` package. All else
is our own code, because the package has no hash of what it writes or reads, and knows no object stores. Its
writer also needs all tensors of a file at once, contiguous, unshared and on the CPU; an export gathers and
converts one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from drivetrain.checkpoint.format.strict_json import MAX_JSON_BYTES, as_record, dump_json, parse_json
from drivetrain.checkpoint.storage.files import CHUNK, Bytes, HashedReader
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's names of the dtypes."""

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

_ALIKE = {
    torch.bfloat16: torch.int16,
    **{each: torch.uint8 for each in CODES if each.is_floating_point and each.itemsize == 1},
}
"""A dtype of the same size for each that numpy lacks."""

_MAX_DIMENSIONS = 64
_METADATA = "__metadata__"
_FIELDS = {"dtype": str, "shape": list, "data_offsets": list}

WRITER: dict[str, Json] = {"written_by": "drivetrain"}
"""The mark in the metadata of drivetrain's files, so that an export replaces its own files alone."""


LEFT_OUT = "drivetrain.frozen"
"""The entry of the metadata with the fingerprints of the parameters that a file leaves out, in JSON."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """The position of one tensor in a file.

    Attributes:
        name: The tensor's name.
        dtype: A key of `DTYPES`.
        shape: The size of each dimension.
        start: The first byte, counted from the end of the header.
        stop: The byte after the last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def check_tensor(tensor: Tensor, where: str) -> None:
    """Check that a safetensors file can store a tensor."""
    if tensor.layout != torch.strided:
        raise CheckpointError(
            f"{where}: a tensor of layout {tensor.layout} cannot be stored; call .to_dense() on it"
        )
    if tensor.is_meta:
        raise CheckpointError(f"{where}: the tensor is on the meta device and has no data to store")
    if tensor.dtype not in CODES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise CheckpointError(f"{where}: dtype {tensor.dtype} cannot be stored; allowed: {allowed}")


def has_plain_bytes(tensor: Tensor) -> bool:
    """Return whether a tensor's values are bytes in memory; those of torchao's quantised tensors are not."""
    values = tensor.detach()
    if type(values) is Tensor or values.is_meta or hasattr(values, "placements"):  # a DTensor has these
        return True
    try:
        values.as_strided((0,), (1,))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def file_layout(
    tensors: Mapping[str, Tensor], what: str, left_out: str = ""
) -> tuple[list[TensorSpan], bytes]:
    """Return the spans of a file's tensors, and the bytes before the first of them.

    The widest dtype comes first, as in the reference writer, so that each is aligned.

    Args:
        tensors: The tensors by name; `check_tensor` has accepted each.
        what: The name for messages.
        left_out: The entry `LEFT_OUT` of the metadata; empty for none.
    """
    return _header(tuple((name, each.dtype, each.shape) for name, each in tensors.items()), what, left_out)


@lru_cache(maxsize=8)  # a run saves tensors of the same names, dtypes and shapes again and again
def _header(
    named: tuple[tuple[str, torch.dtype, torch.Size], ...], what: str, left_out: str
) -> tuple[list[TensorSpan], bytes]:
    # transformers refuses a file that does not give its format.
    more: dict[str, Json] = {LEFT_OUT: left_out} if left_out else {}
    header: dict[str, Json] = {_METADATA: {"format": "pt", **WRITER, **more}}
    spans = []
    start = 0
    for name, dtype, shape in sorted(named, key=lambda each: (-each[1].itemsize, each[0])):
        if name == _METADATA:
            raise CheckpointError(f"{what}: safetensors does not allow the name {name!r}; rename the tensor")
        stop = start + shape.numel() * dtype.itemsize
        spans.append(TensorSpan(name, CODES[dtype], tuple(shape), start, stop))
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = dump_json(header, f"the header of {what}")
    text += b" " * (-len(text) % 8)
    return spans, len(text).to_bytes(8, "little") + text


@dataclass(slots=True)
class Hashes:
    """The XXH3-128 hashes of a tensor file; together they cover every byte.

    Attributes:
        header: The hash of the header and of its length.
        tensors: The hash of each tensor's bytes, by name.
    """

    header: str = ""
    tensors: dict[str, str] = field(default_factory=dict)


def tensor_chunks(tensors: Mapping[str, Tensor], what: str, hashes: Hashes | None = None) -> Iterator[Bytes]:
    """Yield the bytes of a safetensors file, for `files.write_file`.

    Tensors that share memory are each written in full. At most one tensor at a time is copied, or small ones
    of `CHUNK` bytes together: a write for each of hundreds would take longer than their bytes.

    Args:
        tensors: The tensors by name, with any device and strides; `check_tensor` has accepted each.
        what: The name for messages.
        hashes: Filled with the hashes, if given.
    """
    spans, text = file_layout(tensors, what)
    hashes = Hashes() if hashes is None else hashes
    hashes.header = xxhash.xxh3_128_hexdigest(text)
    yield text
    for together in _together(spans):
        if len(together) > 1:
            copies = {span.name: _copied_bytes(tensors[span.name]) for span in together}
            hashes.tensors.update((name, xxhash.xxh3_128_hexdigest(copy)) for name, copy in copies.items())
            yield b"".join(copies.values())
            continue
        digest = xxhash.xxh3_128()
        # No variable for the copy: it would keep the copy alive while the next is made.
        for chunk in _chunks_of(tensors[together[0].name]):
            digest.update(chunk)
            yield chunk
            del chunk
        hashes.tensors[together[0].name] = digest.hexdigest()


def _together(spans: Iterable[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Yield the spans, those next to each other together while they fit in one chunk."""
    together: list[TensorSpan] = []
    for span in spans:
        if together and span.stop - together[0].start > CHUNK:
            yield together
            together = []
        together.append(span)
    if together:
        yield together


def _chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    # In chunks, so that each is still in the processor's cache when it is written.
    view = _as_bytes(np.ascontiguousarray(_for_numpy(tensor).numpy(force=True)))
    for start in range(0, len(view), CHUNK):
        yield view[start : start + CHUNK]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return _as_bytes(_for_numpy(tensor).numpy())


def _copied_bytes(tensor: Tensor) -> bytes:
    # By a call of numpy: those of torch take several times as long, and a save may have many small tensors.
    return _for_numpy(tensor).numpy(force=True).tobytes()


def _for_numpy(tensor: Tensor) -> Tensor:
    alike = _ALIKE.get(tensor.dtype)
    return tensor if alike is None else tensor.detach().view(alike)


def _as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def read_tensors(reader: HashedReader) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into the CPU's memory, each into a separate block.

    A view into one large buffer would keep the whole buffer alive. It might also be unaligned, and then the
    results of math libraries can differ in the last bit.

    Args:
        reader: At the file's start; at its end afterwards. The caller checks the hash before it uses the
            tensors.
    """
    result = {}
    for span in read_header(reader):
        tensor = result[span.name] = room_for(span.shape, span.dtype, f"{reader.path!r}: {span.name!r}")
        if span.stop > span.start:
            reader.read_into(bytes_of(tensor))
    return result


def room_for(shape: tuple[int, ...], dtype: str, what: str) -> Tensor:
    """Return an uninitialised tensor on the CPU.

    Args:
        shape: From a file that is large enough to have it, or with a dimension of 0.

    Raises:
        CheckpointError: There is not enough memory.
        DamagedCheckpointError: An empty tensor of an impossible shape.
    """
    try:
        return torch.empty(shape, dtype=DTYPES[dtype])
    except (RuntimeError, OverflowError) as error:
        # A file that is larger than the free memory is not damaged. An empty tensor takes no memory.
        kind = CheckpointError if math.prod(shape) else DamagedCheckpointError
        raise kind(f"{what}: no room for the shape {list(shape)}: {error}") from error


def read_header(reader: HashedReader, digest: str | None = None) -> list[TensorSpan]:
    """Read the header of a safetensors file; return its tensors in the order of their bytes.

    The spans are adjacent and end with the file, so the file's size bounds the tensors' sizes.

    Args:
        reader: At the file's start; at the first tensor afterwards.
        digest: The header's hash, checked before the header is parsed; None skips the check.
    """
    what = f"the header of {reader.path!r}"
    room = reader.size - 8
    length = int.from_bytes(reader.read(8), "little") if room >= 0 else -1
    if not 0 < length <= min(room, MAX_JSON_BYTES):
        raise DamagedCheckpointError(
            f"{reader.path!r} is not a safetensors file: {reader.size} bytes cannot hold a header of {length}"
        )
    text = reader.read(length)
    if digest is not None:
        reader.check_hash(digest, "its header")
    header = parse_json(text, what)
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{what} is not a JSON object")
    header.pop(_METADATA, None)
    spans = sorted(
        (_span(name, entry, what) for name, entry in header.items()), key=lambda span: (span.start, span.stop)
    )
    position = 0
    for span in spans:
        if span.start != position:
            raise DamagedCheckpointError(f"{what}: {span.name!r} begins at byte {span.start}, not {position}")
        position = span.stop
    if position != room - length:
        raise DamagedCheckpointError(f"{what} has {position} bytes of tensors; the file has {room - length}")
    return spans


def read_left_out(reader: HashedReader) -> Json:
    """Return the entry `LEFT_OUT` of the metadata of a safetensors file, parsed; None without one.

    Args:
        reader: At the start of a file whose header `read_header` has accepted.
    """
    what = f"the metadata of {reader.path!r}"
    header = parse_json(reader.read(int.from_bytes(reader.read(8), "little")), what)
    found = header.get(_METADATA) if isinstance(header, dict) else None
    text = found.get(LEFT_OUT) if isinstance(found, dict) else None
    return parse_json(text.encode(), what) if isinstance(text, str) else None


def _span(name: str, entry: Json, what: str) -> TensorSpan:
    fields = as_record(entry, _FIELDS, f"{what}: {name!r}")
    dtype = fields["dtype"]
    if dtype not in DTYPES:
        raise DamagedCheckpointError(f"{what}: {name!r} has the unknown dtype {dtype!r}")
    shape = read_sizes(fields["shape"], f"{what}: the shape of {name!r}")
    offsets = read_sizes(fields["data_offsets"], f"{what}: the data_offsets of {name!r}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise DamagedCheckpointError(
            f"{what}: {name!r} has the bytes {list(offsets)}, which do not fit {dtype} of shape {list(shape)}"
        )
    return TensorSpan(name, dtype, shape, offsets[0], offsets[1])


def read_sizes(value: Json, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise DamagedCheckpointError(f"{where} is not a list of at most {_MAX_DIMENSIONS} sizes")
    sizes = []
    for each in value:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 1 << 63:
            raise DamagedCheckpointError(f"{where} holds {str(each)[:40]!r}, which is not a size")
        sizes.append(each)
    return tuple(sizes)
