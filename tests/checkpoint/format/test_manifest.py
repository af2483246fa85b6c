"""The manifest believes nothing that it reads."""

import copy
import json
import math

import pytest
import torch
import xxhash

from drivetrain.checkpoint import FORMAT_VERSION, DamagedCheckpointError, Manifest, read_manifest
from drivetrain.checkpoint.format.records import Layout, TensorRecord
from drivetrain.core.errors import CheckpointError

DIGEST = "0" * 32


@pytest.fixture
def good(saved):
    return read_manifest(str(saved)).to_json()


def test_a_manifest_comes_back_as_it_was_and_is_strict_json(saved):
    manifest = read_manifest(str(saved))
    again = Manifest.parse(manifest.dump())
    assert repr(again) == repr(manifest)
    assert math.isnan(again.metrics["train/loss"])
    assert again.progress == {"steps": 1, "epoch": 0}
    assert again.saved_by.keys() == {"drivetrain", "torch", "python", "task"}
    assert again.tensors["model"]["weight"] == TensorRecord(Layout("F32", (8, 3), ((), ())))
    digest = xxhash.xxh3_128_hexdigest(torch.full((8, 3), 1.0).numpy().tobytes())
    assert again.files["model.safetensors"].hashes.tensors["weight"] == digest
    text = (saved / "manifest.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=pytest.fail)
    assert content["format_version"] == FORMAT_VERSION == 1
    assert content["saved_by"]["task"] == "Digits"
    assert content["metrics"] == {"validation/loss": 0.5, "train/loss": "nan"}
    (saved / "manifest.json").write_text(json.dumps(content, indent=4), encoding="utf-8")
    assert read_manifest(str(saved)).progress["steps"] == 1  # reformatted, it still reads
    (saved / "manifest.json").write_text(text.replace('"steps":1', '"steps":2'), encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match="does not match its hash"):
        read_manifest(str(saved))


def cut_in_four(good):  # the same, written by four processes, but for one tensor
    record = {"bytes": 100, "hashes_xxh3_128": DIGEST}
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    good["files"] = {"state.json": good["files"]["state.json"], **dict.fromkeys(names, record)}
    good["processes"] = 4
    good["layouts"] = [
        {"dtype": "F32", "shape": [8, 3], "grid": [[[2, 1]], [[2, 2]]]},
        {"dtype": "F32", "shape": [8], "grid": [[]]},
    ]
    good["tensors"] = {"model": {"weight": [0, 0], "bias": [1, 3]}}
    return good


def test_a_tensor_in_several_pieces_can_be_described(good):
    manifest = Manifest.from_json(cut_in_four(good))
    assert {name: [*map(tuple, each.pieces)] for name, each in manifest.tensors["model"].items()} == {
        "weight": [(0, (0, 0), (4, 2)), (2, (0, 2), (4, 1)), (1, (4, 0), (4, 2)), (3, (4, 2), (4, 1))],
        "bias": [(3, (0,), (8,))],
    }
    assert Manifest.parse(manifest.dump()) == manifest


def test_a_newer_format_says_to_upgrade(good):
    good["format_version"] = 2
    with pytest.raises(CheckpointError, match=r"newer drivetrain: format 2.* reads 1.* Upgrade") as caught:
        Manifest.from_json(good)
    assert not isinstance(caught.value, DamagedCheckpointError)  # it is intact, and must not be set aside


def changed(tree, path, value):
    tree = copy.deepcopy(tree)
    place = tree
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return tree


FILE, PIECES = ("files", "state.json"), ("files", "model-00001-of-00004.safetensors")
RULE = ("layouts", 0)
PARTS = ("format_version", "saved_by", "progress", "metrics", "processes", "files", "layouts", "tensors")
KEYS = ("bytes", "header_xxh3_128", "tensors_xxh3_128")
RECORD = {"bytes": 100, "hashes_xxh3_128": DIGEST}
STRANGERS = ("model-00005-of-00004", "model-00001-of-00003", "model-000001-of-00004", "other-00001-of-00004")
OUTSIDE = ("../evil", "..", ".", "", ".hidden", "/etc/passwd", "a/b", "a\\b", "C:evil", "C:\\evil", "nul\0")
OUTSIDE += ("new\nline", "trailing\n", "café", "a b", "manifest.json")
WRONG = {
    **{(part,): [None, [], "text", 1.5, True, -1, KeyError] for part in PARTS},
    **{("files", name): [{"bytes": 2, "xxh3_128": DIGEST}] for name in OUTSIDE},
    **{("files", f"{name}.safetensors"): [RECORD] for name in (*STRANGERS, "model")},
    FILE: [3],
    (*FILE, "bytes"): [-1, 1.0, True, 1 << 63],
    (*FILE, "xxh3_128"): ["zz", None],
    (*FILE, "extra"): [1],
    (*FILE, "content"): [1, None, {}, "é", "\ud800"],
    (*PIECES, "content"): ["a", "not in base64", "AA=="],  # weights belong to no object
    (*PIECES, "hashes_xxh3_128"): ["zz"],
    (*PIECES, "header_xxh3_128"): [DIGEST],
    PIECES: [
        *({"bytes": 100}, dict(zip(KEYS, (100, DIGEST), strict=False))),
        *(dict(zip(KEYS, (100, DIGEST, each), strict=True)) for each in ([DIGEST], {"weight": "zz"})),
        *(dict(zip(KEYS, each, strict=True)) for each in ((100, DIGEST, {"weight": 3}), (100, "zz", {}))),
    ],
    ("processes",): [0, 3, (1 << 16) + 1],
    RULE: [[]],
    (*RULE, "shape"): [3, [8], [-1, 3], [1] * 65],
    (*RULE, "dtype"): ["F31", 32],
    (*RULE, "extra"): [1],
    (*RULE, "files"): [[0, 1, 2, 3]],
    (*RULE, "grid"): [
        *([], {}, [[[2, 1]]], [[[2, 1]], 2], [[[2, 1]], [2, 2]], [[[2, 1]], [[2]]], [[[2, 1]], [[2, 2, 2]]]),
        *([[[2, 1]], [[2, -1]]], [[[2, 1]], [[2, 0]]], [[[2, 1]], [[0, 2]]], [[[2, 1]], [[True, 2]]]),
        *([[[2, 1]], [[2.0, 2]]], [[[1, 1]] * 17, []]),
        [[[2, 1]], [[2, 3]]],  # beyond the last process
        [[[4, 1]], [[2, 1]]],  # more pieces than processes
    ],
    ("tensors", "model", "weight"): [
        *([], {}, [0], [0, 0, 0], [3, 0], [-1, 0], [0, -1], [0, False], ["0", 0]),
        [0, 1],  # its last piece would be a fifth process's
    ],
    ("tensors", "../model"): [{}],
    ("tensors", "Model"): [{}],
    ("saved_by", "task"): [["os.system"]],
    ("metrics", "a"): ["NaN", None, [1.0]],
}


def test_a_part_that_makes_no_sense_is_refused(good):
    good = cut_in_four(good)
    Manifest.from_json(good)
    for path, value in [(path, value) for path, values in WRONG.items() for value in values]:
        with pytest.raises(DamagedCheckpointError):
            pytest.fail(f"accepted: {path} {Manifest.from_json(changed(good, path, value))}")


def test_any_other_json_is_no_manifest():
    for data in (b"", b"[]", b"{}", b"null", b"1e999", b'{"a":1e999,"xxh3_128":""}', b"[" * 100_000):
        with pytest.raises(CheckpointError):
            Manifest.parse(data)


def test_two_pieces_of_a_tensor_in_one_file_are_refused(good):  # only one hash would be compared
    good = cut_in_four(good)
    good["layouts"][0]["grid"] = [[[2, 1]], [[2, 1]]]
    record = Manifest.from_json(good).tensors["model"]["weight"]
    with pytest.raises(DamagedCheckpointError, match=r"two pieces .* are in one file"):
        record.piece(1)


def test_layouts_with_more_pieces_than_can_be_read_in_seconds_are_refused(good):
    good = cut_in_four(good)
    good.update(processes=1 << 16, files={})
    layout = {"dtype": "F32", "grid": [[[1 << 16, 1]], []]}
    good["layouts"] = [{**layout, "shape": [1 << 20, number]} for number in range(70)]
    with pytest.raises(DamagedCheckpointError, match="more than 4194304 pieces"):
        Manifest.from_json(good)
