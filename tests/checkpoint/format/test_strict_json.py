"""JSON that means one thing, and whose reading is bounded."""

import json
import math

import pytest

from drivetrain.checkpoint import DamagedCheckpointError, Manifest
from drivetrain.checkpoint.format import strict_json as limits
from drivetrain.checkpoint.format.records import FileRecord, Layout, TensorRecord
from drivetrain.checkpoint.format.strict_json import dump_json, parse_json, seal, unseal
from drivetrain.core.errors import CheckpointError


def test_what_is_written_is_read_back():
    value = {"a": [1, -2.5, None, True, "é\ud800😀"], "1" * 5000: 10**4299, "b": 1e308}
    data = dump_json(value, "it")
    assert data.isascii()
    assert parse_json(data, "it") == value
    assert unseal(seal(value, "it"), "it") == value


def test_what_could_not_be_read_back_is_not_written():
    for value in (math.nan, math.inf, {"a": -math.inf}, {1, 2}, b"x", 10**5000, [-(10**5000)]):
        with pytest.raises(CheckpointError, match=r"^it "):
            dump_json(value, "it")
        with pytest.raises(CheckpointError, match=r"^it "):
            seal({"a": value}, "it")
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="Circular"):
        dump_json(value, "it")


REFUSED = {
    "infinite": [b"1e999", b"-1e999", b"9" * 400 + b".0"],
    "NaN is not allowed": [b"NaN"],
    "-Infinity is not allowed": [b"-Infinity", b"[-Infinity]"],
    "4301 digits": [b"9" * 4301],
    "same key twice": [b'{"a":1,"a":1}', b'{"a":{"b":1,"b":1}}'],
    "BOM": [b"\xef\xbb\xbf{}"],
    "utf-8": [b"\xff", b'"\xff"'],
    "nested too deeply": [b"[" * 100_000 + b"]" * 100_000],
    "Extra data": [b"[]]", b"[1] 2"],
    "Expecting": [b"'a'", b"", b"{"],
    "at most": [b" " * (limits.MAX_JSON_BYTES + 1)],
}


def test_what_is_not_strict_or_too_much_is_damage():
    for text, contents in REFUSED.items():
        for data in contents:
            with pytest.raises(DamagedCheckpointError, match=f"^it .*{text}"):
                parse_json(data, "it")


def test_a_seal_holds_the_content_and_not_its_layout():
    content = json.loads(seal({"b": 1, "a": [2]}, "it"))
    assert unseal(json.dumps(content, indent=4, sort_keys=True).encode(), "it") == {"a": [2], "b": 1}
    for change in ({"b": 2}, {"c": 1}, {"xxh3_128": "0" * 32}, {"xxh3_128": None}):
        with pytest.raises(DamagedCheckpointError, match="does not match its hash"):
            unseal(json.dumps({**content, **change}).encode(), "it")
    for data in (b"[]", b"null", b'"x"', b"1"):
        with pytest.raises(DamagedCheckpointError, match="not hold a JSON object"):
            unseal(data, "it")


def test_a_manifest_of_100000_tensors_on_8192_processes_is_within_the_limit():
    """One of a hundredth of the tensors and files is made, within a hundredth of the limit."""
    layouts = [Layout("BF16", (4096, 16384 + 8 * each), (((8192, 1),), ())) for each in range(10)]
    names = [f"transformer.layers.{number}.attention.projection.weight" for number in range(1000)]
    records = {name: TensorRecord(layouts[number % 10]) for number, name in enumerate(names)}
    files = {f"model-{n:05d}-of-08192.safetensors": FileRecord(1 << 40, "f" * 32) for n in range(1, 82)}
    data = Manifest(files, {"model": records}, {}, {}, processes=8192).dump()
    assert Manifest.parse(data).tensors["model"] == records
    assert len(data) * 100 < limits.MAX_JSON_BYTES
