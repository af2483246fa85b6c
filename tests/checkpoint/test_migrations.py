"""What an older drivetrain wrote is read by a newer one; what a newer one wrote is not guessed at."""

import json

import pytest
import torch

from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DamagedCheckpointError,
    DirectoryCheckpointIO,
    Snapshot,
    format,
    index,
    migrations,
    reading,
)
from drivetrain.checkpoint.migrations import Step, steps_from
from drivetrain.checkpoint.strict_json import seal, unseal
from drivetrain.errors import CheckpointError


@pytest.fixture
def saved(tmp_path):
    """A directory with a checkpoint and an index of format 1."""
    manager = CheckpointManager(str(tmp_path), CheckpointConfig(best=0, by=None))
    snapshot = Snapshot({"model": {"w": torch.ones(3)}}, {"state": {"rate": 0.1}}, {"updates": 4, "epoch": 1})
    manager.save(4, 1, {}, lambda: snapshot)
    return tmp_path


@pytest.fixture
def newer(monkeypatch):
    """A drivetrain two formats on: 2 renamed counts and a value of the state, 3 changed the index."""

    def to_two(fields):
        fields["progress"] = {f"{name}_made": count for name, count in fields["progress"].items()}
        return fields

    def state_to_two(name, value):
        return {"learning_rate": value.pop("rate"), **value} if name == "state" else value

    def index_to_three(fields):
        fields["checkpoints"] = fields.pop("entries", fields.get("checkpoints"))
        for entry in fields["checkpoints"]:
            entry["epoch"] += 100
        return fields

    monkeypatch.setitem(migrations.STEPS, 1, Step(manifest=to_two, object=state_to_two))
    monkeypatch.setitem(migrations.STEPS, 2, Step(index=index_to_three))
    for module in (format, index, reading):
        monkeypatch.setattr(module, "FORMAT_VERSION", 3)


def test_an_older_checkpoint_is_brought_up_to_date_as_it_is_read(saved, newer):
    found = DirectoryCheckpointIO().load(str(saved / "update-00000004"))
    assert found.progress == {"updates_made": 4, "epoch_made": 1}
    assert found.objects["state"] == {"learning_rate": 0.1}
    assert found.objects["checkpoint"]["update"] == 4
    assert torch.equal(found.tensors["model"]["w"], torch.ones(3))


def test_an_older_index_is_brought_up_to_date_as_it_is_read(saved, newer):
    (entry,) = CheckpointManager(str(saved), CheckpointConfig()).entries()
    assert (entry.update, entry.epoch) == (4, 101)


def test_what_is_of_the_newest_format_takes_no_step(tmp_path, newer):
    io = DirectoryCheckpointIO()
    io.save(str(tmp_path / "c"), Snapshot({}, {"state": {"rate": 1}}, {"updates": 1}))
    content = json.loads((tmp_path / "c" / "manifest.json").read_text(encoding="utf-8"))
    assert content["format_version"] == 3
    found = io.load(str(tmp_path / "c"))
    assert found.progress == {"updates": 1}
    assert found.objects == {"state": {"rate": 1}}


def test_a_missing_step_is_an_error_and_no_damage(saved, newer, monkeypatch):
    monkeypatch.delitem(migrations.STEPS, 2)
    with pytest.raises(CheckpointError, match=r"is of format 1, and .* no way from format 2 to 3") as caught:
        DirectoryCheckpointIO().load(str(saved / "update-00000004"))
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_steps_are_taken_in_order():
    table = {
        number: Step(manifest=lambda fields, number=number: {"seen": [*fields["seen"], number]})
        for number in range(1, 5)
    }
    fields = {"seen": []}
    for each in steps_from(2, 5, "it", table):
        fields = each.manifest(fields)
    assert fields == {"seen": [2, 3, 4]}
    assert steps_from(5, 5, "it", table) == []


@pytest.mark.parametrize("file", ["index.json", "update-00000004/manifest.json"])
def test_a_newer_format_is_refused_with_the_way_out(saved, file):
    path = saved / file
    body = unseal(path.read_bytes(), "it")
    body["format_version"] = 2
    path.write_bytes(seal(body, "it"))
    text = r"newer drivetrain: format 2.* reads 1.*pip install --upgrade"
    with pytest.raises(CheckpointError, match=text) as caught:
        CheckpointManager(str(saved), CheckpointConfig()).load_latest()
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert path.exists()  # not set aside: it is intact


@pytest.mark.parametrize("version", [0, -1, True, "1", None, 1.0, [1]])
def test_what_is_no_version_is_damage(saved, version):
    path = saved / "update-00000004" / "manifest.json"
    body = unseal(path.read_bytes(), "it")
    body["format_version"] = version
    path.write_bytes(seal(body, "it"))
    with pytest.raises(DamagedCheckpointError, match="format_version is"):
        DirectoryCheckpointIO().load(str(saved / "update-00000004"))
