"""The file of a run of Weights & Biases, ``run-<id>.wandb``, which a killed process leaves behind.

After a header of 7 bytes it is a log of LevelDB: blocks of 32 KiB with pieces of records, which are protocol
buffers. wandb writes it in Go and has no reader in Python. SwanLab's files have the same form.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.core.files import read_file

_HEADER = 7
_BLOCK = 1 << 15
_PIECE = struct.Struct("<IHB")  # checksum, length, kind
_LARGEST = 1 << 32
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, without an end that was cut short.

    Raises:
        NotAFileError: The path leads to no regular file.
        OSError: It cannot be read.
    """
    content = read_file(path, _LARGEST)
    offset, record = _HEADER, b""
    while offset + _PIECE.size <= len(content):
        if _BLOCK - offset % _BLOCK < _PIECE.size:
            offset += _BLOCK - offset % _BLOCK
            continue
        _, length, kind = _PIECE.unpack_from(content, offset)
        offset += _PIECE.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or offset + length > len(content):
            return  # cut short by the kill
        record = (
            content[offset : offset + length]
            if kind in (_WHOLE, _FIRST)
            else record + content[offset : offset + length]
        )
        offset += length
        if kind in (_WHOLE, _LAST):
            yield record


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that were logged to a run, without an end that was cut short.

    Raises:
        NotAFileError: The path leads to no regular file.
        OSError: It cannot be read.
    """
    from wandb.proto import wandb_internal_pb2

    for each in read_records(path):
        record = wandb_internal_pb2.Record.FromString(each)
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
