"""JSON that means one thing: written strictly, read with suspicion, and sealed with a hash of itself."""

from __future__ import annotations

import json
import math

import xxhash

from drivetrain.checkpoint.filesystem import DamagedCheckpointError
from drivetrain.errors import CheckpointError
from drivetrain.types import Json

MAX_JSON_BYTES = 64 << 20
"""No JSON of ours is larger; a file that claims to be is refused before it is read."""

MAX_VALUES = 4_000_000
"""Nor has it more values, counted by its commas..."""

MAX_CONTAINERS = 300_000
"""...nor more lists, objects and keys, which take far longer to read than numbers and texts. Both are counted
before anything is parsed, so that a file of the allowed size cannot take minutes and gigabytes."""

MAX_NOT_ASCII = 8 << 20
"""A file with other than ASCII characters is no larger: one of them makes each of a text take four bytes."""


def _extent(data: bytes | bytearray) -> str:
    """What is too much of the data; "" when nothing is."""
    if len(data) > MAX_JSON_BYTES:
        return f"{len(data)} bytes; at most {MAX_JSON_BYTES} are allowed"
    if len(data) > MAX_NOT_ASCII and not data.isascii():
        return f"{len(data)} bytes; at most {MAX_NOT_ASCII} are allowed where not all are ASCII"
    if data.count(b",") > MAX_VALUES:
        return f"more than the {MAX_VALUES} values that are allowed"
    if max(data.count(b":"), data.count(b"[") + data.count(b"{")) > MAX_CONTAINERS:
        return f"more than the {MAX_CONTAINERS} keys, or lists and objects, that are allowed"
    return ""


def dump_json(value: Json, what: str) -> bytes:
    """Strict, compact JSON in ASCII, so that a lone surrogate in a text survives too.

    Raises:
        CheckpointError: NaN, infinity, a cycle, something that is no JSON, or more than can be read back.
    """
    try:
        data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be written as strict JSON: {error}. Give it through checkpoint.tree.pack, "
            "which stores tensors, tuples, bytes, NaN and infinity exactly"
        ) from error
    excess = _extent(data)
    if excess:
        raise CheckpointError(f"{what} takes, as JSON, {excess}. Keep large data in tensors or arrays")
    return data


def parse_json(data: bytes | bytearray, what: str) -> Json:
    """Read strict JSON: no NaN or infinity, no key twice, no depth or number that exhausts the interpreter.

    Raises:
        DamagedCheckpointError: It is not that; the text begins with `what`.
    """
    excess = _extent(data)
    if excess:
        raise DamagedCheckpointError(f"{what} has {excess}")
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


_SEAL = "xxh3_128"


def seal(body: dict[str, Json], what: str) -> bytes:
    """JSON with a hash of itself inside, for the files that no other file vouches for.

    The hash is of the content with sorted keys, so a file that was reformatted still reads. How it is
    computed is the one thing that no later format may change: it is checked before the version is believed.
    """
    try:
        digest = _content_hash(body)
    except (ValueError, TypeError, RecursionError):
        digest = ""  # the next line says what is wrong
    return dump_json({**body, _SEAL: digest}, what)


def unseal(data: bytes | bytearray, what: str) -> dict[str, Json]:
    """Read what `seal` wrote.

    Raises:
        DamagedCheckpointError: It is no JSON object, or its content is not what was sealed.
    """
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise DamagedCheckpointError(f"{what} holds no JSON object")
    expected = value.pop(_SEAL, None)
    try:
        found = _content_hash(value)
    except (ValueError, TypeError, RecursionError) as error:  # 1e999, which Python reads as infinity
        raise DamagedCheckpointError(f"{what} holds what strict JSON cannot: {error}") from error
    if expected != found:
        raise DamagedCheckpointError(
            f"{what} is not what was written: its content does not match its own hash"
        )
    return value


def _content_hash(body: dict[str, Json]) -> str:
    text = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode("ascii")))
