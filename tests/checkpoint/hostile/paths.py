"""Pickles and archives in the place of files; names, links, pipes and devices that lead elsewhere."""

import json
import os
import shutil
import socket

import torch
from tests.checkpoint.hostile import cases
from tests.checkpoint.weights.models import Planted
from tests.support.held import in_files

from drivetrain.checkpoint import export_weights
from drivetrain.checkpoint.format.strict_json import seal
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.checkpoint.saving.index import read_index

for name in ("model.safetensors", "state.json"):
    cases.enter(
        f"a_pickle_for_{name}",
        lambda d, name=name: cases.replace(d / "c", name, cases.bomb(d)) or cases.load(d / "c"),
    )


@cases.case
def a_pickle_for_the_manifest(d):
    (d / "c" / "manifest.json").write_bytes(cases.bomb(d))
    return cases.load(d / "c")


@cases.case
def a_pickle_for_the_index(d):
    (d / "index.json").write_bytes(cases.bomb(d))
    shutil.rmtree(d / "c")  # else it is made anew from the checkpoints
    return cases.open_directory(d)


@cases.case
def a_torch_file_of_code(d):
    (d / "hub").mkdir()
    for name in ("w.pt", "w.safetensors", "hub/pytorch_model.bin"):
        torch.save({"w": Planted(d / "EXPLODED")}, d / name)
    return [cases.read_plain(d / name) for name in ("w.pt", "w.safetensors", "hub")]


def with_file(name):  # a name in the manifest that leads elsewhere, where what it says is to be found
    def make(d):
        for place in (d, d.parent):
            shutil.copy(in_files(d / "c") / "state.json", place / "x.json")
        cases.rewrite(d / "c", lambda body: body["files"].update({name: body["files"]["state.json"]}))
        return cases.load(d / "c")

    return make


NAMES = [
    *("../../etc/passwd", "/etc/passwd", "..", "../x.json", "../../x.json", "/x.json", "./state.json", ""),
    *("a/../../x.json", "..\\x.json", "C:\\x.json", "C:x.json", "a\0.json", "\0.json", "x\n.json"),
    *("x" * 300 + ".json", "x" * 100_000 + ".json", ".hidden.json", "con.json", "NUL.json", "lpt1.x.json"),
    *("é.json", "\uff58.json", "\u202enosj.json", "\ud800.json", "state.json ", "manifest.json", "x.json\n"),
    "index.html",
]
for number, name in enumerate(NAMES):
    cases.enter(f"a_file_name_{number}", with_file(name))


def renamed(section, old, name):
    def make(d):
        cases.rewrite(d / "c", lambda body: body[section].update({name: body[section].pop(old)}))
        return cases.load(d / "c")

    return make


for number, name in enumerate(["../other.safetensors", "/dev/zero", "state.json", "manifest.json"]):
    cases.enter(f"a_tensor_in_another_place_{number}", renamed("files", "model.safetensors", name))
for number, name in enumerate(["../model", "MODEL", "", "manifest", "a/b", "con", "x" * 300 + "/"]):
    cases.enter(f"a_group_named_{number}", renamed("tensors", "optimizer", name))


def good_copy(path):  # a link to what was there: right in every byte, and still a link
    os.rename(path, path.parent.parent / "elsewhere")
    os.symlink(path.parent.parent / "elsewhere", path)


def socket_file(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS = {  # what may stand in the place of a file
    "link to device": lambda path: os.symlink("/dev/zero", path),
    "link to itself": lambda path: os.symlink(path, path),
    "dangling link": lambda path: os.symlink(path.parent / "nothing", path),
    "pipe": os.mkfifo,
    "socket": socket_file,
    "directory": os.mkdir,
    "endless hole": lambda path: os.truncate(path, 1 << 40),
    "empty": lambda path: path.touch(),
}


def in_the_place_of(place, kind):
    def make(d):
        (d / "hub").mkdir()
        weights = {"a": torch.ones(4), "b": torch.ones(4)}
        export_weights(weights, d / "w.safetensors")
        export_weights(weights, d / "hub" / "model.safetensors", max_shard_size=16)
        predictions = d / "predictions-000000.safetensors"
        export_weights({"value": torch.ones(1)}, predictions)
        (d / "predictions-000000.json").write_bytes(b'{"$tensor":"value"}')
        listed = {"name": "c", "order": 1, "step": 1, "epoch": 0, "metrics": {}, "resume": [""]}
        index = {"format_version": 1, "checkpoints": [{**listed, "best": {}}]}
        (d / "index.json").write_bytes(seal(index, "it"))
        reads = {
            "index.json": lambda: read_index(str(d)),
            "c": cases.load(d / "c"),
            "w.safetensors": cases.read_plain(d / "w.safetensors"),
            "hub": cases.read_plain(d / "hub"),
        }
        read = reads.get(place.split("/")[0], lambda: read_predictions(predictions))
        in_files(d / "c")
        if kind == "good copy":
            good_copy(d / place)
            if not place.startswith(("c/", "index", "predictions-000000.json")):
                return cases.harmless(read)  # the caches of model hubs are full of links
        else:
            if kind != "endless hole":  # which begins with what was there
                (d / place).unlink()
            KINDS[kind](d / place)
        return read

    return make


# Each of the first is read in a way of its own. The others are read like one of these, and get some kinds.
OWN_WAYS = ("c/manifest.json", "index.json", "w.safetensors")
LIKE_THESE = ("c/state.json", "c/model.safetensors", "hub/model.safetensors.index.json")
LIKE_THESE += ("hub/model-00001-of-00002.safetensors", "predictions-000000.json")
LIKE_THESE += ("predictions-000000.safetensors",)
for number, place in enumerate((*OWN_WAYS, *LIKE_THESE)):
    for kind in ("good copy", *(KINDS if place in OWN_WAYS else [*KINDS][number % 3 :: 3])):
        cases.enter(f"{kind} for {place}", in_the_place_of(place, kind), "places")


@cases.case
def a_link_for_the_checkpoint(d):
    os.symlink(d / "c", d / "link")
    return cases.load(d / "link")


def hub(weight_map):
    def make(d):
        (d / "hub").mkdir()
        index = {"metadata": {"total_size": 4}, "weight_map": weight_map}
        (d / "hub" / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        (d / "outside.safetensors").write_bytes(cases.safetensors({"w": cases.entry()}, b"\0" * 4))
        return cases.read_plain(d / "hub")

    return make


for number, place in enumerate(("../outside.safetensors", "/etc/passwd", 3, "absent.safetensors", "a\0b")):
    cases.enter(f"an_index_of_a_hub_{number}", hub({"w": place}))
cases.enter("an_index_of_a_hub_without_a_map", hub([]))
