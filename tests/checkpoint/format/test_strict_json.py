"""JSON that means one thing, and whose reading is bounded."""

import json
import math

import pytest

from drivetrain.checkpoint import DamagedCheckpointError, Manifest
from drivetrain.checkpoint.format.records import FileRecord, Layout, TensorRecord
from drivetrain.checkpoint.format.strict_json import (
    MAX_CONTAINERS,
    MAX_JSON_BYTES,
    MAX_NOT_ASCII,
    MAX_VALUES,
    dump_json,
    parse_json,
    seal,
    unseal,
)
from drivetrain.core.errors import CheckpointError


def test_what_is_written_is_read_back():
    value = {"a": [1, -2.5, None, True, "é\ud800😀"], "1" * 5000: 10**4299, "b": 1e308}
    data = dump_json(value, "it")
    assert data.isascii()
    assert parse_json(data, "it") == value
    assert unseal(seal(value, "it"), "it") == value


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, {"a": -math.inf}, {1, 2}, b"x", 10**5000, [-(10**5000)]],
    ids=range(7),
)
def test_what_could_not_be_read_back_is_not_written(value):
    with pytest.raises(CheckpointError, match=r"^it "):
        dump_json(value, "it")
    with pytest.raises(CheckpointError, match=r"^it "):
        seal({"a": value}, "it")


def test_a_value_that_contains_itself_is_not_written():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="Circular"):
        dump_json(value, "it")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"1e999", "infinite"),
        (b"-1e999", "infinite"),
        (b"9" * 400 + b".0", "infinite"),
        (b"NaN", "NaN is not allowed"),
        (b"-Infinity", "-Infinity is not allowed"),
        (b"9" * 4301, "4301 digits"),
        (b'{"a":1,"a":1}', "same key twice"),
        (b'{"a":{"b":1,"b":1}}', "same key twice"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"[]]", "Extra data"),
        (b"'a'", "Expecting value"),
        (b"", "Expecting value"),
        (b" " * (MAX_JSON_BYTES + 1), "at most"),
        (b"[" + b"," * (MAX_VALUES + 1) + b"]", "values that are allowed"),
        (b"[" * (MAX_CONTAINERS + 1), "lists and objects"),
        (b":" * (MAX_CONTAINERS + 1), "lists and objects"),
        ("é".encode() * MAX_NOT_ASCII, "not all are ASCII"),
    ],
    ids=range(19),
)
def test_what_is_not_strict_or_too_much_is_damage(data, text):
    with pytest.raises(DamagedCheckpointError, match=f"^it .*{text}"):
        parse_json(data, "it")


def test_a_seal_holds_the_content_and_not_its_layout():
    data = seal({"b": 1, "a": [2]}, "it")
    content = json.loads(data)
    assert unseal(json.dumps(content, indent=4, sort_keys=True).encode(), "it") == {"a": [2], "b": 1}
    for change in ({"b": 2}, {"c": 1}, {"xxh3_128": "0" * 32}, {"xxh3_128": None}):
        with pytest.raises(DamagedCheckpointError, match="does not match its own hash"):
            unseal(json.dumps({**content, **change}).encode(), "it")


@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"1"])
def test_what_is_sealed_is_an_object(data):
    with pytest.raises(DamagedCheckpointError, match="not hold a JSON object"):
        unseal(data, "it")


def test_a_manifest_of_100000_tensors_on_8192_processes_is_within_the_limits():
    """One of a hundredth of the tensors and files is made, within a hundredth of each limit."""
    layouts = [Layout("BF16", (4096, 16384 + 8 * each), (((8192, 1),), ())) for each in range(10)]
    records = {
        f"transformer.layers.{number}.attention.projection.weight": TensorRecord(layouts[number % 10])
        for number in range(1000)
    }
    names = [f"model-{number:05d}-of-08192.safetensors" for number in range(1, 82)]
    files = {name: FileRecord(1 << 40, "f" * 32) for name in names}
    data = Manifest(files, {"model": records}, {}, {}, processes=8192).dump()
    assert Manifest.parse(data).tensors["model"] == records
    assert len(data) * 100 < MAX_JSON_BYTES
    assert data.count(b",") * 100 < MAX_VALUES
    assert max(data.count(b":"), data.count(b"[") + data.count(b"{")) * 100 < MAX_CONTAINERS
