"""What a checkpoint is said to be, also one of a kind that no trainer saves."""

import torch

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.inspection.description import Totals, describe, open_checkpoint


def described(path, snapshot):
    DirectoryCheckpointIO().save(str(path), snapshot)
    return describe(open_checkpoint(str(path)))


def test_tensors_are_added_up_and_arguments_shown_by_their_fields(tmp_path):
    tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(5), "c": torch.zeros(2, dtype=torch.bfloat16)}
    norm = {"norm": {"class": "Norm", "values": {}}}
    layer = {"class": "Layer", "values": {"width": 8}, "dataclasses": norm}
    stored = {"values": {"depth": 2}, "dataclasses": {"layer": layer}, "unstored": ["loss"]}
    found = described(tmp_path / "a", Snapshot({"model": tensors, "empty": {}}, {"hparams": stored}))
    assert found.groups["model"] == Totals(3, 19, 72, {"BF16": 2, "F32": 17})
    assert found.groups["empty"] == Totals(0, 0, 0, {})
    assert found.hparams == {"depth": 2, "layer": {"class": "Layer", "width": 8, "norm": {"class": "Norm"}}}
    assert found.unstored == ["loss"]
