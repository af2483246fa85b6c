"""What an older drivetrain wrote is read by a newer one; what a newer one wrote is not guessed at."""

import contextlib
import copy
import json
import shutil

import pytest
import torch
from tests.checkpoint.make_corpus import CORPUS

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format import manifest as format
from drivetrain.checkpoint.format import migrations
from drivetrain.checkpoint.format.migrations import Step
from drivetrain.checkpoint.format.strict_json import seal, unseal
from drivetrain.checkpoint.saving import index, reading
from drivetrain.checkpoint.saving.io import verify
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):  # a directory with a checkpoint and an index of the newest format
    manager = CheckpointManager(str(tmp_path), CheckpointConfig(best=0, by=None))
    snapshot = Snapshot({"model": {"w": torch.ones(3)}}, {"state": {"rate": 0.1}}, {"updates": 4, "epoch": 1})
    manager.save(4, 1, {}, lambda: snapshot)
    return tmp_path


@pytest.fixture
def newer(monkeypatch):  # 5 renames counts and a value of the state, 6 changes the index
    def to_five(fields):
        fields["progress"] = {f"{name}_made": count for name, count in fields["progress"].items()}
        return fields

    def state_to_five(name, value):
        return {"learning_rate": value.pop("rate"), **value} if name == "state" else value

    def index_to_six(fields):
        fields["checkpoints"] = fields.pop("entries", fields.get("checkpoints"))
        for entry in fields["checkpoints"]:
            entry["epoch"] += 100
        return fields

    monkeypatch.setitem(migrations.STEPS, 4, Step(manifest=to_five, object=state_to_five))
    monkeypatch.setitem(migrations.STEPS, 5, Step(index=index_to_six))
    for module in (format, index, reading):
        monkeypatch.setattr(module, "FORMAT_VERSION", 6)


def load(saved):
    return DirectoryCheckpointIO().load(str(saved / "update-00000004"))


def test_an_older_format_is_brought_up_to_date_as_it_is_read(saved, newer, monkeypatch):
    found = load(saved)
    assert found.progress == {"updates_made": 4, "epoch_made": 1}
    assert found.objects["state"] == {"learning_rate": 0.1}
    assert found.objects["checkpoint"]["update"] == 4
    assert torch.equal(found.tensors["model"]["w"], torch.ones(3))
    (entry,) = CheckpointManager(str(saved), CheckpointConfig()).entries()
    assert (entry.update, entry.epoch) == (4, 101)
    monkeypatch.delitem(migrations.STEPS, 5)
    with pytest.raises(CheckpointError, match=r"has format 4, and .* cannot convert format 5 to 6") as caught:
        load(saved)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_what_is_of_the_newest_format_takes_no_step(tmp_path, newer):
    io = DirectoryCheckpointIO()
    io.save(str(tmp_path / "c"), Snapshot({}, {"state": {"rate": 1}}, {"updates": 1}))
    content = json.loads((tmp_path / "c" / "manifest.json").read_text(encoding="utf-8"))
    assert content["format_version"] == 6
    found = io.load(str(tmp_path / "c"))
    assert (found.progress, found.objects) == ({"updates": 1}, {"state": {"rate": 1}})


def rewrite(path, **changes):
    path.write_bytes(seal({**unseal(path.read_bytes(), "it"), **changes}, "it"))


@pytest.mark.parametrize("file", ["index.json", "update-00000004/manifest.json"])
def test_a_newer_format_is_refused_with_the_way_out(saved, file):
    rewrite(saved / file, format_version=5)
    with pytest.raises(CheckpointError, match=r"newer drivetrain: format 5.* reads 4.*pip install") as caught:
        CheckpointManager(str(saved), CheckpointConfig()).load_latest()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert (saved / file).exists()  # not set aside: it is intact


def test_what_is_no_version_is_damage(saved):
    for version in (0, -1, True, "1", None, 1.0, [1]):
        rewrite(saved / "update-00000004" / "manifest.json", format_version=version)
        with pytest.raises(DamagedCheckpointError, match="format_version is"):
            load(saved)


V1 = CORPUS / "v1" / "sharded-by-4" / "manifest.json"


def places(value, path=()):
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, (dict, list)):
            yield from places(each, (*path, key))
        else:
            yield (*path, key)


def test_a_manifest_of_format_1_that_makes_no_sense_is_an_error_of_ours():
    body = unseal(V1.read_bytes(), "it")
    for value in (None, 3, -1, 1 << 70, "x", [], {}, [0], [[0]], {"x": 1}):
        for path in places(body):
            changed = copy.deepcopy(body)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if path:
                place[path[-1]] = value
            with contextlib.suppress(CheckpointError):
                format.Manifest.from_json(changed if path else {"format_version": 1, "x": value})


def test_the_hashes_of_format_1_are_compared(tmp_path):
    shutil.copytree(V1.parent, tmp_path / "c")
    path = tmp_path / "c" / "model-00003-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for act in (DirectoryCheckpointIO().load, verify):
        with pytest.raises(DamagedCheckpointError, match="model-00003-of-00004"):
            act(str(tmp_path / "c"))


def test_an_index_of_format_2_keeps_its_purposes(tmp_path):
    directory = shutil.copytree(CORPUS / "v2" / "run" / "checkpoints", tmp_path / "checkpoints")
    policy = CheckpointConfig(every="4 steps", keep_last=2, best=1)
    from_index = CheckpointManager(str(directory), policy).entries()
    found = [(each.update, each.resume, each.keeper) for each in from_index]
    assert found == [(8, ("",), {}), (10, ("",), {"validation/loss": ""})]
    (directory / "index.json").unlink()
    rebuilt = CheckpointManager(str(directory), policy)
    assert [(each.update, each.resume) for each in rebuilt.entries()] == [(8, ("",)), (10, ("",))]
    rebuilt.save(12, 2, {"validation/loss": 99.0}, Snapshot, resume=["4 steps"], keeper=True)
    assert [(each.update, bool(each.keeper)) for each in rebuilt.entries()] == [(10, True), (12, False)]


def test_an_entry_of_format_2_that_makes_no_sense_is_damage(tmp_path):
    named = {"name": "a", "order": 1, "update": 1, "epoch": 0, "resume": 1, "keeper": True, "metrics": {}}
    nameless = "an entry is not an object with a name"
    for entry, text in ((3, nameless), ({}, nameless), (named, "resume must be a list of intervals")):
        body = {"format_version": 2, "checkpoints": [entry]}
        (tmp_path / "index.json").write_bytes(seal(body, "it"))
        with pytest.raises(DamagedCheckpointError, match=text):
            index.read_index(str(tmp_path))
