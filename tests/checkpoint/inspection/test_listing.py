"""Lists of checkpoints: what is told of each, and that a run which saves meanwhile does no harm."""

import os
import threading

import torch

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, Snapshot
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.inspection.listing import list_checkpoints


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
