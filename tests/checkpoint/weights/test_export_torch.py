"""Weights as a file of torch.save: only tensors, tied ones tied, whole or not there."""

import os

import pytest
import torch
from tests.checkpoint.weights.models import Tied

from drivetrain.checkpoint import export_torch, load_weights
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.core.errors import CheckpointError


def test_export_torch_writes_a_state_dict_that_torch_loads_as_weights_only(tmp_path):
    model = Tied()
    path = str(tmp_path / "out" / "model.pt")
    assert export_torch(model.state_dict(), path, dtype="float64") == path
    found = torch.load(path, weights_only=True)
    assert list(found) == list(model.state_dict())
    assert torch.equal(found["head.weight"], model.head.weight.double())
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert found["embedding.weight"].data_ptr() == found["head.weight"].data_ptr()
    Tied().load_state_dict(found, strict=True)
    assert torch.equal(load_weights(path)["head.weight"], found["head.weight"])


def test_a_view_brings_no_more_than_itself(tmp_path):
    large = torch.arange(1_000_000.0)
    export_torch({"part": large[10:14], "turned": torch.ones(2, 3).T}, tmp_path / "w.pt")
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["part"].tolist() == [10, 11, 12, 13]
    assert found["turned"].shape == (3, 2)
    assert os.path.getsize(tmp_path / "w.pt") < 10_000


def test_an_existing_file_is_replaced_only_by_a_whole_one(tmp_path, monkeypatch):
    def failing(descriptor):
        raise OSError(28, "No space left on device")

    path = tmp_path / "w.pt"
    (tmp_path / ".saving-w.pt").write_bytes(b"half")  # what a killed export has left goes
    export_torch({"w": torch.ones(2)}, path)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match=r"cannot write .*w.pt.*ENOSPC.*free some space"):
        export_torch({"w": torch.zeros(2)}, path)
    assert torch.load(path, weights_only=True)["w"].tolist() == [1, 1]
    assert os.listdir(tmp_path) == ["w.pt"]


class Small(LocalFileSystem):
    """A disk with room for so many bytes, which takes few at a time."""

    def __init__(self, room):
        self.room = room

    def create(self, path):
        sink = super().create(path)
        write = sink.write

        def take(data):
            if self.room <= 0:
                raise OSError(28, "No space left on device")
            taken = write(data[: min(self.room, 5000)])
            self.room -= taken
            return taken

        sink.write = take
        return sink


def test_a_disk_that_fills_up_half_way_says_so_and_a_slow_one_gets_all(tmp_path):
    def descriptors():  # a deleted file among the open ones is seen nowhere else
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    tensors = {"w": torch.arange(20_000.0)}
    before = descriptors()
    with pytest.raises(CheckpointError, match=r"cannot write .*w.pt'.*ENOSPC.*free some space"):
        export_torch(tensors, tmp_path / "w.pt", files=Small(50_000))
    assert os.listdir(tmp_path) == []
    assert descriptors() == before
    export_torch(tensors, tmp_path / "w.pt", files=Small(100_000))
    assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], tensors["w"])
