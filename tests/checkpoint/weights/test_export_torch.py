"""Weights as a file of torch.save: only tensors, tied ones tied, whole or not there."""

import os

import pytest
import torch
from tests.checkpoint.weights.models import Tied

from drivetrain.checkpoint import export_torch, load_weights
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
