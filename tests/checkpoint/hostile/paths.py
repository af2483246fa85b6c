"""Pickles and archives in the place of files; names, links, pipes and devices that lead elsewhere."""

import json
import os
import shutil
import socket
import zipfile

import torch
from tests.checkpoint.hostile.cases import (
    CASES,
    Bomb,
    bomb,
    case,
    entry,
    harmless,
    load,
    open_directory,
    read_plain,
    replace,
    rewrite,
    safetensors,
)
from tests.support.held import in_files

from drivetrain.checkpoint import export_weights
from drivetrain.checkpoint.format.strict_json import seal
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.checkpoint.saving.index import read_index

# Pickles and archives in the place of files.


@case
def a_pickle_for_weights(d):
    replace(d / "c", "model.safetensors", bomb(d))
    return load(d / "c")


@case
def a_pickle_for_an_object(d):
    replace(d / "c", "state.json", bomb(d))
    return load(d / "c")


@case
def a_pickle_for_the_manifest(d):
    (d / "c" / "manifest.json").write_bytes(bomb(d))
    return load(d / "c")


@case
def a_pickle_for_the_index(d):
    (d / "index.json").write_bytes(bomb(d))
    shutil.rmtree(d / "c")  # else it is made anew from the checkpoints
    return open_directory(d)


@case
def a_pickle_as_a_plain_file(d):
    (d / "w.safetensors").write_bytes(bomb(d))
    return read_plain(d / "w.safetensors")


@case
def a_torch_file_named_pt(d):
    torch.save({"w": Bomb(str(d / "EXPLODED"))}, d / "w.pt")
    return read_plain(d / "w.pt")


@case
def a_torch_file_named_safetensors(d):
    torch.save({"w": Bomb(str(d / "EXPLODED"))}, d / "w.safetensors")
    return read_plain(d / "w.safetensors")


@case
def a_folder_with_a_pytorch_model_bin(d):
    (d / "hub").mkdir()
    torch.save({"w": Bomb(str(d / "EXPLODED"))}, d / "hub" / "pytorch_model.bin")
    return read_plain(d / "hub")


@case
def a_zip_bomb_for_weights(d):
    with zipfile.ZipFile(d / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"\0" * (200 << 20))
    replace(d / "c", "model.safetensors", (d / "bomb").read_bytes())
    return load(d / "c")


def with_file(name):
    """A name in the manifest that leads elsewhere, where what it says is to be found."""

    def make(d):
        for place in (d, d.parent):
            shutil.copy(in_files(d / "c") / "state.json", place / "x.json")

        def change(body):
            body["files"][name] = body["files"]["state.json"]

        rewrite(d / "c", change)
        return load(d / "c")

    return make


for number, name in enumerate(
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "../x.json",
        "../../x.json",
        "/x.json",
        "./state.json",
        "a/../../x.json",
        "..\\x.json",
        "C:\\x.json",
        "C:x.json",
        "a\0.json",
        "\0.json",
        "x\n.json",
        "x.json\n",
        "x" * 300 + ".json",
        "x" * 100_000 + ".json",
        ".hidden.json",
        "con.json",
        "NUL.json",
        "lpt1.x.json",
        "é.json",
        "\uff58.json",
        "\u202enosj.json",
        "\ud800.json",
        "state.json ",
        "manifest.json",
        "index.html",
        "",
    ]
):
    CASES[f"a_file_name_{number}"] = with_file(name)


def with_group_file(name):
    def make(d):
        def change(body):
            body["files"][name] = body["files"].pop("model.safetensors")

        rewrite(d / "c", change)
        return load(d / "c")

    return make


for number, name in enumerate(["../other.safetensors", "/dev/zero", "state.json", "manifest.json"]):
    CASES[f"a_tensor_in_another_place_{number}"] = with_group_file(name)


def with_group(name):
    def make(d):
        def change(body):
            body["tensors"][name] = body["tensors"].pop("optimizer")

        rewrite(d / "c", change)
        return load(d / "c")

    return make


for number, name in enumerate(["../model", "MODEL", "", "manifest", "a/b", "con", "x" * 300 + "/"]):
    CASES[f"a_group_named_{number}"] = with_group(name)


def seal_index(d, entry):
    listed = {**entry, "resume": True, "keeper": False}
    (d / "index.json").write_bytes(seal({"format_version": 1, "checkpoints": [listed]}, "it"))


def good_copy(path):
    """A link to what was there: right in every byte, and still a link."""
    os.rename(path, path.parent.parent / "elsewhere")
    os.symlink(path.parent.parent / "elsewhere", path)


def link_to_device(path):
    path.unlink()
    os.symlink("/dev/zero", path)


def link_to_itself(path):
    path.unlink()
    os.symlink(path, path)


def dangling_link(path):
    path.unlink()
    os.symlink(path.parent / "nothing", path)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def socket_file(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def directory(path):
    path.unlink()
    path.mkdir()


def endless_hole(path):
    os.truncate(path, 1 << 40)


def empty(path):
    path.write_bytes(b"")


KINDS = (good_copy, link_to_device, link_to_itself, dangling_link, pipe, socket_file, directory)
KINDS += (endless_hole, empty)
"""What may stand in the place of a file."""


def plain(d):
    """Files of weights of other programs: one, and a folder; and predictions."""
    (d / "hub").mkdir()
    weights = {"a": torch.ones(4), "b": torch.ones(4)}
    export_weights(weights, d / "w.safetensors")
    export_weights(weights, d / "hub" / "model.safetensors", max_shard_size=16)
    export_weights({"value": torch.ones(1)}, d / "predictions-000000.safetensors")
    (d / "predictions-000000.json").write_bytes(b'{"$tensor":"value"}')


def in_the_place_of(place, kind):
    def make(d):
        plain(d)
        predictions = d / "predictions-000000.safetensors"
        if place == "index.json":
            seal_index(d, {"name": "c", "order": 1, "update": 1, "epoch": 0, "metrics": {}})
            read = lambda: read_index(str(d))  # noqa: E731
        else:
            reads = {
                "c": load(d / "c"),
                "w.safetensors": read_plain(d / "w.safetensors"),
                "hub": read_plain(d / "hub"),
                "predictions-000000.json": lambda: read_predictions(predictions),
                "predictions-000000.safetensors": lambda: read_predictions(predictions),
            }
            read = reads[place.split("/")[0]]
        in_files(d / "c")
        kind(d / place)
        if kind is good_copy and not place.startswith(("c/", "index", "predictions-000000.json")):
            return harmless(read)  # the caches of model hubs are full of links
        return read

    return make


# Each of the first is read in a way of its own. The others are read like one of these, and get some kinds.
OWN_WAYS = ("c/manifest.json", "index.json", "w.safetensors")
LIKE_THESE = (
    "c/state.json",
    "c/model.safetensors",
    "hub/model.safetensors.index.json",
    "hub/model-00001-of-00002.safetensors",
    "predictions-000000.json",
    "predictions-000000.safetensors",
)
for number, place in enumerate((*OWN_WAYS, *LIKE_THESE)):
    for kind in KINDS if place in OWN_WAYS else dict.fromkeys((good_copy, *KINDS[number % 3 :: 3])):
        CASES[f"{kind.__name__} for {place}"] = in_the_place_of(place, kind)


@case
def a_link_for_the_checkpoint(d):
    os.symlink(d / "c", d / "link")
    return load(d / "link")


def hub(d, weight_map):
    (d / "hub").mkdir()
    index = {"metadata": {"total_size": 4}, "weight_map": weight_map}
    (d / "hub" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (d / "outside.safetensors").write_bytes(safetensors({"w": entry()}, b"\0" * 4))
    return read_plain(d / "hub")


for number, weight_map in enumerate(
    [
        {"w": "../outside.safetensors"},
        {"w": "/etc/passwd"},
        {"w": 3},
        {"w": "absent.safetensors"},
        [],
        {"w": "a\0b"},
    ]
):
    CASES[f"an_index_of_a_hub_{number}"] = lambda d, weight_map=weight_map: hub(d, weight_map)
