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


def test_a_manifest_comes_back_as_it_was(saved):
    manifest = read_manifest(str(saved))
    again = Manifest.parse(manifest.dump())
    assert repr(again) == repr(manifest)
    assert math.isnan(again.metrics["train/loss"])
    assert again.progress == {"updates": 1, "epoch": 0}
    assert again.saved_by.keys() == {"drivetrain", "torch", "python", "task"}
    stored = again.tensors["model"]["weight"]
    assert stored == TensorRecord(Layout("F32", (8, 3), ((), ())))
    digest = xxhash.xxh3_128_hexdigest(torch.full((8, 3), 1.0).numpy().tobytes())
    assert again.files["model.safetensors"].hashes.tensors["weight"] == digest


def test_the_file_is_strict_json_that_people_can_read(saved):
    content = json.loads((saved / "manifest.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["format_version"] == FORMAT_VERSION == 4
    assert content["saved_by"]["task"] == "Digits"
    assert content["metrics"] == {"validation/loss": 0.5, "train/loss": "nan"}


def cut_in_four(good):
    """The same, written by four processes, with one tensor by a rule and one spelled out."""
    record = {"bytes": 100, "hashes_xxh3_128": DIGEST}
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    good["files"] = {"state.json": good["files"]["state.json"], **dict.fromkeys(names, record)}
    good["processes"] = 4
    good["layouts"] = [
        {"dtype": "F32", "shape": [8, 3], "grid": [[[2, 1]], [[2, 2]]]},
        {"dtype": "F32", "shape": [8, 3], "cuts": [[0, 3], [0, 2]], "files": [3, 0, 1, 2]},
        {"dtype": "F32", "shape": [8], "grid": [[]]},
    ]
    good["tensors"] = {"model": {"weight": [0, 0], "other": [1, 0], "bias": [2, 3]}}
    return good


def test_a_tensor_in_several_pieces_can_be_described(good):
    manifest = Manifest.from_json(cut_in_four(good))
    tensors = manifest.tensors["model"]
    assert [tuple(piece) for piece in tensors["weight"].pieces] == [
        (0, (0, 0), (4, 2)),
        (2, (0, 2), (4, 1)),
        (1, (4, 0), (4, 2)),
        (3, (4, 2), (4, 1)),
    ]
    assert [tuple(piece) for piece in tensors["other"].pieces] == [
        (3, (0, 0), (3, 2)),
        (0, (0, 2), (3, 1)),
        (1, (3, 0), (5, 2)),
        (2, (3, 2), (5, 1)),
    ]
    assert [tuple(piece) for piece in tensors["bias"].pieces] == [(3, (0,), (8,))]
    assert Manifest.parse(manifest.dump()) == manifest


def test_a_newer_format_says_to_upgrade(good):
    good["format_version"] = 5
    with pytest.raises(
        CheckpointError, match=r"saved by a newer drivetrain: format 5.* reads 4\. Upgrade"
    ) as caught:
        Manifest.from_json(good)
    assert not isinstance(caught.value, DamagedCheckpointError)  # it is intact, and must not be set aside


@pytest.mark.parametrize(
    "key",
    ["format_version", "saved_by", "progress", "metrics", "processes", "files", "layouts", "tensors"],
)
def test_a_missing_key_or_a_wrong_type_is_refused(good, key):
    for value in (None, [], "text", 1.5, True, -1):
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
PIECES = ("files", "model-00001-of-00004.safetensors")
RULE, SPELLED = ("layouts", 0), ("layouts", 1)
TENSOR = ("tensors", "model", "weight")


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
        ((*FILE, "content"), 1),
        ((*FILE, "content"), None),
        ((*FILE, "content"), {}),
        ((*FILE, "content"), "é"),
        ((*FILE, "content"), "\ud800"),
        ((*PIECES, "content"), "a"),
        ((*PIECES, "content"), "not in base64"),
        ((*PIECES, "content"), "AA=="),  # weights belong to no object
        ((*PIECES, "hashes_xxh3_128"), "zz"),
        ((*PIECES, "header_xxh3_128"), DIGEST),
        (PIECES, {"bytes": 100}),
        (PIECES, {"bytes": 100, "header_xxh3_128": DIGEST}),
        (PIECES, {"bytes": 100, "header_xxh3_128": DIGEST, "tensors_xxh3_128": [DIGEST]}),
        (PIECES, {"bytes": 100, "header_xxh3_128": DIGEST, "tensors_xxh3_128": {"weight": "zz"}}),
        (PIECES, {"bytes": 100, "header_xxh3_128": DIGEST, "tensors_xxh3_128": {"weight": 3}}),
        (PIECES, {"bytes": 100, "header_xxh3_128": "zz", "tensors_xxh3_128": {}}),
        (("files", "model-00005-of-00004.safetensors"), {"bytes": 100, "hashes_xxh3_128": DIGEST}),
        (("files", "model-00001-of-00003.safetensors"), {"bytes": 100, "hashes_xxh3_128": DIGEST}),
        (("files", "model-000001-of-00004.safetensors"), {"bytes": 100, "hashes_xxh3_128": DIGEST}),
        (("files", "other-00001-of-00004.safetensors"), {"bytes": 100, "hashes_xxh3_128": DIGEST}),
        (("files", "model.safetensors"), {"bytes": 100, "hashes_xxh3_128": DIGEST}),
        (("processes",), 0),
        (("processes",), 3),
        (("processes",), (1 << 16) + 1),
        (RULE, []),
        ((*RULE, "shape"), 3),
        ((*RULE, "shape"), [8]),
        ((*RULE, "shape"), [-1, 3]),
        ((*RULE, "shape"), [1] * 65),
        ((*RULE, "dtype"), "F31"),
        ((*RULE, "dtype"), 32),
        ((*RULE, "extra"), 1),
        ((*RULE, "files"), [0, 1, 2, 3]),
        ((*RULE, "grid"), []),
        ((*RULE, "grid"), {}),
        ((*RULE, "grid"), [[[2, 1]]]),
        ((*RULE, "grid"), [[[2, 1]], 2]),
        ((*RULE, "grid"), [[[2, 1]], [2, 2]]),
        ((*RULE, "grid"), [[[2, 1]], [[2]]]),
        ((*RULE, "grid"), [[[2, 1]], [[2, 2, 2]]]),
        ((*RULE, "grid"), [[[2, 1]], [[2, -1]]]),
        ((*RULE, "grid"), [[[2, 1]], [[2, 0]]]),
        ((*RULE, "grid"), [[[2, 1]], [[0, 2]]]),
        ((*RULE, "grid"), [[[2, 1]], [[True, 2]]]),
        ((*RULE, "grid"), [[[2, 1]], [[2.0, 2]]]),
        ((*RULE, "grid"), [[[2, 1]], [[2, 3]]]),  # beyond the last process
        ((*RULE, "grid"), [[[4, 1]], [[2, 1]]]),  # more pieces than processes
        ((*RULE, "grid"), [[[1, 1]] * 17, []]),
        ((*SPELLED, "cuts"), []),
        ((*SPELLED, "cuts"), {}),
        ((*SPELLED, "cuts"), [[0, 3]]),
        ((*SPELLED, "cuts"), [[0, 3], 2]),
        ((*SPELLED, "cuts"), [[0, 3], []]),
        ((*SPELLED, "cuts"), [[1, 3], [0, 2]]),
        ((*SPELLED, "cuts"), [[0, 8], [0, 2]]),
        ((*SPELLED, "cuts"), [[3, 0], [0, 2]]),
        ((*SPELLED, "cuts"), [[0, 0], [0, 2]]),
        ((*SPELLED, "cuts"), [[0, 3], [0, True]]),
        ((*SPELLED, "cuts"), [[0, 3], [0, 1, 2]]),
        ((*SPELLED, "files"), [0, 1, 2]),
        ((*SPELLED, "files"), 0),
        ((*SPELLED, "files"), [0, 1, 2, 4]),
        ((*SPELLED, "files"), [0, 1, 2, 2]),
        ((*SPELLED, "files"), [0, 1, 2, -1]),
        ((*SPELLED, "files"), [1, 2, 3, False]),
        ((*SPELLED, "files"), ["model.safetensors"] * 4),
        (TENSOR, []),
        (TENSOR, {}),
        (TENSOR, [0]),
        (TENSOR, [0, 0, 0]),
        (TENSOR, [3, 0]),
        (TENSOR, [-1, 0]),
        (TENSOR, [0, 1]),  # its last piece would be a fifth process's
        (TENSOR, [0, -1]),
        (TENSOR, [0, False]),
        (TENSOR, ["0", 0]),
        (("tensors", "../model"), {}),
        (("tensors", "Model"), {}),
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


def test_two_pieces_of_a_tensor_in_one_file_are_refused(good):
    """They would be read from the same bytes, and only one hash would be compared."""
    good = cut_in_four(good)
    good["layouts"][0]["grid"] = [[[2, 1]], [[2, 1]]]
    record = Manifest.from_json(good).tensors["model"]["weight"]
    with pytest.raises(DamagedCheckpointError, match=r"two pieces .* are in one file"):
        record.piece(1)


def test_layouts_with_more_pieces_than_can_be_read_in_seconds_are_refused(good):
    good = cut_in_four(good)
    good["processes"] = 1 << 16
    good["files"] = {}
    layout = {"dtype": "F32", "shape": [1 << 20], "grid": [[[1 << 16, 1]]]}
    good["layouts"] = [{**layout, "shape": [1 << 20, number]} for number in range(70)]
    for each in good["layouts"]:
        each["grid"] = [[[1 << 16, 1]], []]
    with pytest.raises(DamagedCheckpointError, match="more than 4194304 pieces"):
        Manifest.from_json(good)
