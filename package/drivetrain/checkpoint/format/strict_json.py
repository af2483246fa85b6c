"""Strict JSON: written without NaN, read with limits, and sealed with its hash."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import xxhash

from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError
from drivetrain.core.types import Json

MAX_JSON_BYTES = 64 << 20
"""The largest JSON file; larger ones raise before they are read."""


def dump_json(value: Json, what: str) -> bytes:
    """Return strict, compact JSON in ASCII, which keeps even a lone surrogate in a text.

    Raises:
        CheckpointError: NaN, infinity, a cycle, a value that JSON lacks, or more than `parse_json` accepts.
    """
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be written as strict JSON: {error}. Give it through checkpoint.tree.pack, "
            "which stores tensors, tuples, bytes, NaN and infinity exactly"
        ) from error
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{what} takes {len(data)} bytes as JSON; at most {MAX_JSON_BYTES} are allowed. Keep large data"
            " in tensors or arrays"
        )
    return data


def parse_json(data: bytes | bytearray, what: str) -> Json:
    """Parse strict JSON: no NaN, infinity or duplicate keys, and nothing that exhausts the interpreter.

    Raises:
        DamagedCheckpointError: The data is not strict JSON; the message begins with `what`.
    """
    if len(data) > MAX_JSON_BYTES:
        raise DamagedCheckpointError(f"{what} has {len(data)} bytes; at most {MAX_JSON_BYTES} are allowed")
    try:
        value: Json = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise DamagedCheckpointError(f"{what} is nested too deeply") from error
    except ValueError as error:  # bad UTF-8, bad JSON, and integers beyond the interpreter's 4300 digits
        raise DamagedCheckpointError(f"{what} is not valid JSON: {error}") from error
    return value


def _without_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("an object has the same key twice")
    return result


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not allowed")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is infinite")
    return value


def as_object(value: Json, what: str) -> dict[str, Json]:
    """Return a value that must be a JSON object."""
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not an object")
    return value


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number, at least 0",
    float: "a number, at least 0",
    list: "a list",
    dict: "an object",
}


def as_record(value: Json, kinds: Mapping[str, type], what: str) -> dict[str, Any]:
    """Return a JSON object that must have exactly these keys, each with a value of its kind.

    Numbers must be at least 0; a whole one may stand for a float.
    """
    fields: dict[str, Any] = as_object(value, what)
    if fields.keys() != kinds.keys():
        wrong = ", ".join(repr(name[:40]) for name in sorted(fields.keys() ^ kinds.keys())[:8])
        raise DamagedCheckpointError(f"{what} must have exactly {', '.join(sorted(kinds))}; wrong: {wrong}")
    for name, kind in kinds.items():
        found = fields[name]
        is_right = type(found) is kind or (kind is float and type(found) is int)
        if not is_right or (kind in (int, float) and found < 0):
            raise DamagedCheckpointError(f"{what}: {name} is {str(found)[:40]!r}, not {_KINDS[kind]}")
    return fields


def as_text(value: Json, what: str) -> str:
    """Return a value that must be a text."""
    if not isinstance(value, str):
        raise DamagedCheckpointError(f"{what} is a {type(value).__name__}, not a text")
    return value


_SEAL = "xxh3_128"


def seal(body: dict[str, Json], what: str) -> bytes:
    """Return JSON that contains its own hash, for files that no other file has a hash of.

    The hash is of the content with sorted keys, so a reformatted file can still be read. No later format may
    change how it is computed: it is checked before the version is read.
    """
    try:
        digest = _content_hash(body)
    except (ValueError, TypeError, RecursionError):
        digest = ""  # the next line raises, and says why
    return dump_json({**body, _SEAL: digest}, what)


def unseal(data: bytes | bytearray, what: str) -> dict[str, Json]:
    """Parse the result of `seal`."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} does not hold a JSON object")
    expected = value.pop(_SEAL, None)
    try:
        found = _content_hash(value)
    except (ValueError, TypeError, RecursionError) as error:  # 1e999, which Python reads as infinity
        raise DamagedCheckpointError(f"{what} holds what strict JSON cannot: {error}") from error
    if expected != found:
        raise DamagedCheckpointError(f"{what} is not what was written: its content does not match its hash")
    return value


def _content_hash(body: dict[str, Json]) -> str:
    text = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode("ascii")))
