"""Weights as a plain file: replaced whole or not at all."""

import os

import pytest
import torch

from drivetrain.checkpoint import DamagedCheckpointError, export_weights, load_weights
from drivetrain.errors import CheckpointError


def test_an_existing_file_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch):
    path = tmp_path / "run" / "model.safetensors"
    export_weights({"w": torch.ones(2)}, path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(
            CheckpointError, match=r"cannot write .*model.safetensors.*ENOSPC.*free some space"
        ):
            export_weights({"w": torch.zeros(2)}, path)
    assert torch.equal(load_weights(path)["w"], torch.ones(2))
    assert os.listdir(path.parent) == ["model.safetensors"]
    export_weights({"w": torch.zeros(2)}, path)
    assert torch.equal(load_weights(path)["w"], torch.zeros(2))


def failing(descriptor):
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name a descriptor")
def test_the_file_is_durable_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    export_weights({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert events[0].startswith(".saving-model.safetensors-")
    assert events[1:] == ["replace", tmp_path.name]


@pytest.mark.skipif(not hasattr(os, "symlink") or os.name == "nt", reason="no symbolic links here")
def test_a_link_into_a_cache_of_models_is_followed(tmp_path):
    export_weights({"w": torch.ones(2)}, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert torch.equal(load_weights(tmp_path / "model.safetensors")["w"], torch.ones(2))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DamagedCheckpointError, match=r"nowhere.safetensors' is missing"):
        load_weights(tmp_path / "nowhere.safetensors")
