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
    place, record = _HEADER, b""
    while place + _PIECE.size <= len(content):
        if _BLOCK - place % _BLOCK < _PIECE.size:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = _PIECE.unpack_from(content, place)
        place += _PIECE.size
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or place + length > len(content):
            return  # cut short by the kill
        record = (
            content[place : place + length]
            if kind in (_WHOLE, _FIRST)
            else record + content[place : place + length]
        )
        place += length
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
