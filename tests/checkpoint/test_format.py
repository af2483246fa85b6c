"""The manifest believes nothing that it reads."""

import copy
import json
import math

import pytest
import torch
import xxhash

from drivetrain.checkpoint import FORMAT_VERSION, DamagedCheckpointError, Manifest, read_manifest
from drivetrain.checkpoint.format import Piece, TensorRecord
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


def test_a_tensor_in_several_pieces_can_be_described(good):
    record = good["tensors"]["model"]["weight"]
    file = record["pieces"][0]["file"]
    pieces = [(0, 0), (0, 2), (3, 0), (3, 2)]  # a grid, as cuts along both dimensions give
    record["pieces"] = [
        {
            "file": file,
            "offset": [row, column],
            "shape": [5 if row else 3, 1 if column else 2],
            "xxh3_128": DIGEST,
        }
        for row, column in pieces
    ]
    loaded = Manifest.from_json(good).tensors["model"]["weight"]
    assert loaded.shape == (8, 3)
    assert [(piece.offset, piece.shape) for piece in loaded.pieces] == [
        ((0, 0), (3, 2)),
        ((0, 2), (3, 1)),
        ((3, 0), (5, 2)),
        ((3, 2), (5, 1)),
    ]


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 3))],  # a part is missing
        [((0, 0), (8, 3)), ((0, 0), (8, 3))],  # twice
        [((0, 0), (5, 3)), ((4, 0), (4, 3))],  # overlapping
        [((0, 0), (3, 3)), ((4, 0), (4, 3))],  # a gap
        [((4, 0), (4, 3))],  # not from the start
        [((0, 0), (8, 2)), ((0, 2), (4, 1))],  # as many rows as there are, but not in every column
        [((0, 0), (8, 3)), ((4, 0), (0, 3))],  # an empty one
    ],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(good, boxes):
    record = good["tensors"]["model"]["weight"]
    file = record["pieces"][0]["file"]
    record["pieces"] = [
        {"file": file, "offset": list(offset), "shape": list(shape), "xxh3_128": DIGEST}
        for offset, shape in boxes
    ]
    with pytest.raises(DamagedCheckpointError, match=r"'weight'.* do not make up \[8, 3\]"):
        Manifest.from_json(good)


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
TENSOR = ("tensors", "model", "weight")
PIECE = (*TENSOR, "pieces", 0)


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
        ((*TENSOR, "pieces"), []),
        ((*TENSOR, "pieces"), {}),
        (PIECE, "model.safetensors"),
        ((*PIECE, "file"), "absent.safetensors"),
        ((*PIECE, "file"), "../model.safetensors"),
        ((*PIECE, "offset"), [0]),
        ((*PIECE, "offset"), [1, 0]),
        ((*PIECE, "shape"), [8, 4]),
        ((*PIECE, "shape"), [8, 3, 1]),
        (("tensors", "../model"), {}),
        (("tensors", "Model"), {}),
        (("saved_by", "task"), ["os.system"]),
        (("metrics", "a"), "NaN"),
        (("metrics", "a"), None),
        (("metrics", "a"), [1.0]),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(good, path, value):
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
