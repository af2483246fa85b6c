"""Lists of checkpoints: what is told of each, and that a run which saves meanwhile does no harm."""

import os
import threading

import pytest
import torch

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.inspection.listing import list_checkpoints
from drivetrain.core.errors import CheckpointError


def snapshot():
    return Snapshot({"model": {"w": torch.zeros(2)}}, progress={"updates": 7, "epoch": 1})


def saved(directory, updates):
    manager = CheckpointManager(str(directory), CheckpointConfig(keep_last=9, best=0, by=None))
    for update in updates:
        manager.save(update, 0, {}, snapshot)
    return manager


def conditions(directory):
    return {each.name: each.condition for each in list_checkpoints(directory).checkpoints}


def test_the_order_is_that_of_the_saves_and_not_of_the_updates(tmp_path):
    saved(tmp_path, [5, 9])
    saved(tmp_path, [6])  # of a run that went on from an earlier checkpoint
    names = [each.name for each in list_checkpoints(tmp_path).checkpoints]
    assert names == ["update-00000005", "update-00000009", "update-00000006"]


def test_one_that_the_index_lacks_tells_of_itself_and_what_is_none_is_not_listed(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("", encoding="ascii")
    assert list_checkpoints(tmp_path).checkpoints == ()
    DirectoryCheckpointIO().save(str(tmp_path / "mine"), snapshot())
    (found,) = list_checkpoints(tmp_path).checkpoints
    assert (found.entry.update, found.entry.epoch, found.condition) == (7, 1, "committed")
    (alone,) = list_checkpoints(tmp_path / "mine").checkpoints
    assert alone.name == "mine"
    assert alone.bytes == sum(path.stat().st_size for path in (tmp_path / "mine").iterdir())
    for name, text in (("nowhere", "does not exist"), ("notes.txt", "is a file")):
        with pytest.raises(CheckpointError, match=text):
            list_checkpoints(tmp_path / name)


def test_what_is_left_of_damaged_and_removed_ones_is_told(tmp_path):
    saved(tmp_path, [1, 2, 3])
    (tmp_path / "update-00000001" / MANIFEST).unlink()
    (tmp_path / "update-00000002").rename(tmp_path / ".removing-update-00000002-00000000")
    (tmp_path / "update-00000003").rename(tmp_path / "update-00000003.bad-2")
    assert conditions(tmp_path) == {
        "update-00000001": "damaged",
        "update-00000002": "gone",
        ".removing-update-00000002-00000000": "unfinished",
        "update-00000003": "gone",
        "update-00000003.bad-2": "set aside",
    }


def test_in_an_object_store_marks_tell_the_same(tmp_path):
    directory = f"memory://{tmp_path.name}"
    files = saved(directory, [1, 2, 3]).files
    files.rename(f"{directory}/update-00000001/{MANIFEST}", f"{directory}/update-00000001/{MANIFEST}.bad")
    files.delete(f"{directory}/update-00000002/{MANIFEST}")
    files.create(f"{directory}/half/.saving").finish()
    assert conditions(directory) == {
        "update-00000001": "set aside",
        "update-00000002": "damaged",
        "half": "unfinished",
        "update-00000003": "committed",
    }


def test_a_linked_run_directory_is_listed(tmp_path):
    saved(tmp_path / "run" / "checkpoints", [1])
    (tmp_path / "latest").symlink_to(tmp_path / "run", target_is_directory=True)
    for place in (tmp_path / "latest", f"file://{tmp_path}/run"):
        assert conditions(place) == {"update-00000001": "committed"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_one_that_may_not_be_read_is_told_among_the_others(tmp_path):
    saved(tmp_path, [1, 2])
    (tmp_path / "update-00000001").chmod(0)
    try:
        assert conditions(tmp_path) == {"update-00000001": "unreadable", "update-00000002": "committed"}
    finally:
        (tmp_path / "update-00000001").chmod(0o700)


def test_a_run_that_saves_and_prunes_meanwhile_is_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    manager = CheckpointManager(str(tmp_path), CheckpointConfig(keep_last=2, best=0, by=None))
    manager.save(0, 0, {}, snapshot)
    done = threading.Event()

    def save():
        try:
            for update in range(1, 40):
                manager.save(update, 0, {}, snapshot)
        finally:
            done.set()

    saving = threading.Thread(target=save)
    saving.start()
    seen = set()
    while not done.is_set():
        seen |= {each.condition for each in list_checkpoints(tmp_path).checkpoints}
    saving.join()
    assert seen <= {"committed", "unfinished"}
