"""Checkpoints described, listed and compared: what counts as a difference, and how large it is."""

import math

import pytest
import torch

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.inspection import compare as comparison
from drivetrain.checkpoint.inspection.compare import compare
from drivetrain.checkpoint.inspection.description import Totals, describe, open_checkpoint
from drivetrain.checkpoint.inspection.listing import list_checkpoints
from drivetrain.checkpoint.saving.index import PURPOSE


@pytest.fixture
def differences(tmp_path):
    """Save two snapshots and compare them."""
    count = iter(range(100))

    def run(first, second, **options):
        paths = [str(tmp_path / str(next(count))) for _ in range(2)]
        for path, snapshot in zip(paths, (first, second), strict=True):
            DirectoryCheckpointIO().save(path, snapshot)
        return compare(*paths, **options)

    return run


def model(tensor):
    return Snapshot({"model": {"w": tensor}})


def values(found):
    return {f"{each.section}.{each.name}": (each.first, each.second) for each in found.values}


def test_how_far_apart_tensors_are(differences, monkeypatch):
    def measured(first, second):
        (found,) = differences(model(first), model(second), values=True).tensors
        return found

    for first, second, max_abs, relative in (
        ([3.0, 4.0], [3.0, 4.5], 0.5, 0.1),
        ([0.0, 0.0], [0.0, 1.0], 1.0, math.inf),
        ([0.0], [-0.0], 0.0, 0.0),
        ([math.inf, 1.0], [math.inf, 2.0], 1.0, 1.0),
        ([math.nan, 1.0], [math.nan, 2.0], 1.0, 1.0),
        ([math.inf, 1.0], [2.0, 1.0], math.inf, math.inf),
    ):
        found = measured(torch.tensor(first), torch.tensor(second))
        assert (found.max_abs, found.relative) == pytest.approx((max_abs, relative))
    assert math.isnan(measured(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])).max_abs)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64):
        assert measured(torch.tensor([0, 1]).to(dtype), torch.tensor([0, 0]).to(dtype)).max_abs == 1.0
    weights = torch.tensor([1.0, 1.001])
    found = measured(weights, weights.bfloat16())
    assert (found.kind, found.max_abs) == ("dtype", pytest.approx(0.001, rel=1e-3))
    monkeypatch.setattr(comparison, "_CHUNK", 3)  # large ones are measured piece by piece and alone
    monkeypatch.setattr(comparison, "_AT_ONCE", 0)
    first = torch.arange(10.0)
    second = first.clone()
    second[7] += 2.0
    found = measured(first, second)
    assert (found.max_abs, found.relative) == (2.0, pytest.approx(2.0 / first.norm().item()))


def test_time_and_purpose_are_no_differences_and_settings_of_optimizers_are(differences):
    def run(seconds, rate=0.1, names=("a", "b")):
        optimizer = {"optimizer": "SGD", "groups": [{"lr": rate, "parameters": list(names)}]}
        state = {"timing": {"data": seconds}, "optimizers": {"default": optimizer}}
        objects = {"state": state, PURPOSE: {"order": int(seconds)}}
        return Snapshot(objects=objects, progress={"updates": 3, "seconds": seconds})

    assert differences(run(1.0), run(2.0)).is_same
    assert values(differences(run(1.0), run(1.0, 0.2, "bac"))) == {
        "optimizers.default.groups.0.lr": (0.1, 0.2),
        "optimizers.default.groups.0.parameters.c": (None, True),
    }


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
