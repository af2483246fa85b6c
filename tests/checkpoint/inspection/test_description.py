"""What a checkpoint is said to be, also one of a kind that no trainer saves."""

import math

import pytest
import torch
from tests.support.held import in_files

from drivetrain.checkpoint import DamagedCheckpointError, DirectoryCheckpointIO, Snapshot, pack
from drivetrain.checkpoint.inspection.description import Totals, describe, open_checkpoint, readable


def described(path, snapshot):
    DirectoryCheckpointIO().save(str(path), snapshot)
    return describe(open_checkpoint(str(path)))


def test_stored_values_are_readable():
    for value, shown in (
        ((0.9, 0.999), [0.9, 0.999]),
        ({1: "a", "$x": (2,)}, {"1": "a", "$x": [2]}),
        (math.inf, math.inf),
        (1 << 80, 1 << 80),
        (b"abc", "<3 bytes>"),
        ({"step": torch.zeros(2)}, {"step": "<tensor step>"}),
        ({3: torch.zeros(2)}, {"3": "<tensor 3>"}),
        ({}, {}),
    ):
        assert readable(pack(value)[0]) == shown
    assert readable({"$quaternion": [1, 2, 3, 4]}) == [1, 2, 3, 4]  # of a later format
    assert readable({"$int": "no number"}) == "no number"


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


def test_a_state_of_another_kind_is_no_error_and_a_damaged_file_is(tmp_path):
    states = (None, 3, [], {"optimizers": 1}, {"optimizers": {"a": {"groups": [1]}}})
    for number, state in enumerate(states):
        found = described(tmp_path / str(number), Snapshot(objects={"state": state, "hparams": state}))
        assert found.hparams == {}
        assert all(isinstance(each.groups, list) for each in found.optimizers.values())
    DirectoryCheckpointIO().save(str(tmp_path / "a"), Snapshot(objects={"hparams": {"values": {"a": 1}}}))
    in_files(tmp_path / "a")
    (tmp_path / "a" / "hparams.json").write_text('{"values":{"a":2}}', encoding="ascii")
    with pytest.raises(DamagedCheckpointError, match=r"hparams\.json"):
        describe(open_checkpoint(str(tmp_path / "a")))
