"""The manifest believes nothing that it reads."""

import copy
import json
import math

import pytest
import torch
import xxhash

from drivetrain.checkpoint import FORMAT_VERSION, DamagedCheckpointError, Manifest, read_manifest
from drivetrain.checkpoint.records import Piece, TensorRecord
from drivetrain.errors import CheckpointError

DIGEST = "0" * 32


@pytest.fixture
def good(saved):
    return read_manifest(str(saved)).to_json()


def test_a_manifest_comes_back_as_it_was(saved):
    manifest = read_manifest(str(saved))
    again = Manifest.parse(manifest.dump())
    assert repr(again) == repr(manifest)
    assert math.isnan(again.metrics["train/loss"])
    assert again.progress == {"updates": 1, "epoch": 0}
    assert again.saved_by.keys() == {"drivetrain", "torch", "python", "task"}
    stored = again.tensors["model"]["weight"]
    digest = xxhash.xxh3_128_hexdigest(torch.full((8, 3), 1.0).numpy().tobytes())
    assert stored == TensorRecord((8, 3), "F32", (Piece("model.safetensors", (0, 0), (8, 3), digest),))


def test_the_file_is_strict_json_that_people_can_read(saved):
    content = json.loads((saved / "manifest.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["format_version"] == FORMAT_VERSION == 1
    assert content["saved_by"]["task"] == "Digits"
    assert content["metrics"] == {"validation/loss": 0.5, "train/loss": "nan"}


def cut_in_four(good):
    group = good["tensors"]["model"]
    group["files"] = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    good["files"].update(dict.fromkeys(group["files"], good["files"]["model.safetensors"]))
    group["tensors"]["weight"] = {
        "dtype": "F32",
        "shape": [8, 3],
        "cuts": [[0, 3], [0, 2]],
        "files": [0, 1, 2, 3],
        "xxh3_128": [DIGEST] * 4,
    }
    return good


def test_a_tensor_in_several_pieces_can_be_described(good):
    manifest = Manifest.from_json(cut_in_four(good))
    loaded = manifest.tensors["model"]["weight"]
    assert loaded.shape == (8, 3)
    assert [(piece.offset, piece.shape) for piece in loaded.pieces] == [
        ((0, 0), (3, 2)),
        ((0, 2), (3, 1)),
        ((3, 0), (5, 2)),
        ((3, 2), (5, 1)),
    ]
    assert Manifest.parse(manifest.dump()) == manifest


def box(offset, shape):
    return Piece("model.safetensors", offset, shape, DIGEST)


@pytest.mark.parametrize(
    "boxes",
    [
        [box((0, 0), (4, 3))],  # a part is missing
        [box((0, 0), (8, 3)), box((0, 0), (8, 3))],  # twice
        [box((0, 0), (5, 3)), box((4, 0), (4, 3))],  # overlapping
        [box((0, 0), (3, 3)), box((4, 0), (4, 3))],  # a gap
        [box((4, 0), (4, 3))],  # not from the start
        [box((0, 0), (8, 2)), box((0, 2), (4, 1))],  # not in every column
        [box((0, 0), (8, 3)), box((4, 0), (0, 3))],  # an empty one
    ],
)
def test_pieces_that_do_not_make_up_the_tensor_are_not_written(good, boxes):
    manifest = Manifest.from_json(good)
    manifest.tensors["model"]["weight"] = TensorRecord((8, 3), "F32", tuple(boxes))
    with pytest.raises(CheckpointError, match=r"'weight' do not make up \[8, 3\]"):
        manifest.dump()


def test_pieces_may_come_in_any_order(good):
    manifest = Manifest.from_json(cut_in_four(good))
    record = manifest.tensors["model"]["weight"]
    turned = TensorRecord(record.shape, record.dtype, record.pieces[::-1])
    manifest.tensors["model"]["weight"] = turned
    assert Manifest.parse(manifest.dump()).tensors["model"]["weight"] == record


def test_a_newer_format_says_to_upgrade(good):
    good["format_version"] = 2
    with pytest.raises(
        CheckpointError, match=r"saved by a newer drivetrain: format 2.* reads 1\. Upgrade"
    ) as caught:
        Manifest.from_json(good)
    assert not isinstance(caught.value, DamagedCheckpointError)  # it is intact, and must not be set aside


@pytest.mark.parametrize("key", ["format_version", "saved_by", "progress", "metrics", "files", "tensors"])
@pytest.mark.parametrize("value", [None, [], "text", 1.5, True, -1])
def test_a_missing_key_or_a_wrong_type_is_refused(good, key, value):
    with pytest.raises(DamagedCheckpointError):
        Manifest.from_json({**good, key: value})
    with pytest.raises(DamagedCheckpointError):
        Manifest.from_json({name: each for name, each in good.items() if name != key})


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "..",
        ".",
        "",
        ".hidden",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "C:evil",
        "C:\\evil",
        "nul\0",
        "new\nline",
        "trailing\n",
        "café",
        "a b",
        "manifest.json",
    ],
)
def test_a_file_name_that_could_lead_elsewhere_is_refused(good, name):
    good["files"][name] = good["files"]["state.json"]
    with pytest.raises(DamagedCheckpointError, match="which no checkpoint contains"):
        Manifest.from_json(good)


def change(tree, path, value):
    tree = copy.deepcopy(tree)
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return tree


FILE = ("files", "state.json")
GROUP = ("tensors", "model")
TENSOR = (*GROUP, "tensors", "weight")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (FILE, 3),
        ((*FILE, "bytes"), -1),
        ((*FILE, "bytes"), 1.0),
        ((*FILE, "bytes"), True),
        ((*FILE, "bytes"), 1 << 63),
        ((*FILE, "xxh3_128"), "zz"),
        ((*FILE, "xxh3_128"), None),
        ((*FILE, "extra"), 1),
        (TENSOR, []),
        ((*TENSOR, "shape"), 3),
        ((*TENSOR, "shape"), [-1, 3]),
        ((*TENSOR, "shape"), [1] * 65),
        ((*TENSOR, "dtype"), "F31"),
        ((*TENSOR, "dtype"), 32),
        ((*TENSOR, "cuts"), []),
        ((*TENSOR, "cuts"), {}),
        ((*TENSOR, "cuts"), [[0, 3]]),
        ((*TENSOR, "cuts"), [[0, 3], 2]),
        ((*TENSOR, "cuts"), [[0, 3], []]),
        ((*TENSOR, "cuts"), [[1, 3], [0, 2]]),
        ((*TENSOR, "cuts"), [[0, 8], [0, 2]]),
        ((*TENSOR, "cuts"), [[3, 0], [0, 2]]),
        ((*TENSOR, "cuts"), [[0, 0], [0, 2]]),
        ((*TENSOR, "cuts"), [[0, 3], [0, True]]),
        ((*TENSOR, "cuts"), [[0, 3], [0, 1, 2]]),
        ((*TENSOR, "files"), [0, 1, 2]),
        ((*TENSOR, "files"), 0),
        ((*TENSOR, "files"), [0, 1, 2, 4]),
        ((*TENSOR, "files"), [0, 1, 2, 2]),
        ((*TENSOR, "files"), [0, 1, 2, -1]),
        ((*TENSOR, "files"), [1, 2, 3, False]),
        ((*TENSOR, "files"), ["model.safetensors"] * 4),
        ((*TENSOR, "xxh3_128"), [DIGEST] * 3),
        ((*TENSOR, "xxh3_128"), [DIGEST] * 3 + ["zz"]),
        ((*TENSOR, "xxh3_128"), DIGEST),
        ((*TENSOR, "extra"), 1),
        ((*GROUP, "files"), ["absent.safetensors"]),
        ((*GROUP, "files"), ["../model.safetensors"]),
        ((*GROUP, "files"), ["state.json"]),
        ((*GROUP, "files"), "model.safetensors"),
        ((*GROUP, "extra"), []),
        (("tensors", "../model"), {"files": [], "tensors": {}}),
        (("tensors", "Model"), {"files": [], "tensors": {}}),
        (("saved_by", "task"), ["os.system"]),
        (("metrics", "a"), "NaN"),
        (("metrics", "a"), None),
        (("metrics", "a"), [1.0]),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(good, path, value):
    good = cut_in_four(good)
    Manifest.from_json(good)
    with pytest.raises(DamagedCheckpointError):
        Manifest.from_json(change(good, path, value))


def test_a_changed_manifest_does_not_match_its_own_hash(saved):
    path = saved / "manifest.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"updates":1', '"updates":2'), encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match="does not match its own hash"):
        read_manifest(str(saved))


def test_a_reformatted_manifest_still_reads(saved):
    path = saved / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=4), encoding="utf-8")
    assert read_manifest(str(saved)).progress["updates"] == 1


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"null", b"1e999", b'{"a":1e999,"xxh3_128":""}', b"[" * 100_000]
)
def test_any_other_json_is_no_manifest(data):
    with pytest.raises(CheckpointError):
        Manifest.parse(data)


def test_two_pieces_of_a_tensor_are_not_written_into_one_file(good):
    manifest = Manifest.from_json(good)
    halves = (box((0, 0), (4, 3)), box((4, 0), (4, 3)))
    manifest.tensors["model"]["weight"] = TensorRecord((8, 3), "F32", halves)
    with pytest.raises(CheckpointError, match="two parts of 'weight' are in one file"):
        manifest.dump()
