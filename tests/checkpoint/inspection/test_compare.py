"""Two checkpoints side by side: what counts as a difference, and how large it is said to be."""

import math

import pytest
import torch
from tests.support.ranks import on_two_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack
from drivetrain.checkpoint.inspection import compare as comparison
from drivetrain.checkpoint.inspection.compare import compare
from drivetrain.checkpoint.inspection.description import open_checkpoint
from drivetrain.checkpoint.saving.index import PURPOSE
from drivetrain.distributed.ranks import Ranks


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


def test_what_is_stored_in_other_pieces_is_read(tmp_path):
    def save_rows(path, whole):
        rows = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, model(rows))

    sharded, same, other = (str(tmp_path / name) for name in ("sharded", "same", "other"))
    whole = torch.arange(10.0).reshape(5, 2)
    on_two_ranks(save_rows, sharded, whole)
    DirectoryCheckpointIO().save(same, model(whole))
    DirectoryCheckpointIO().save(other, model(whole + torch.eye(5, 2)))
    assert len(open_checkpoint(sharded).manifest.tensors["model"]["w"].pieces) == 2
    assert compare(sharded, same).is_same
    found = compare(sharded, other, values=True).tensors
    assert [(each.kind, each.max_abs) for each in found] == [("content", 1.0)]


def test_values_keep_their_types_and_need_not_be_numbers(differences):
    first, second = (
        Snapshot(objects={"state": pack(tree)[0], "hparams": {"values": pack(tree)[0], "unstored": []}})
        for tree in (
            {"a": (1, 2), "b": 1, "c": math.nan, "d": {"x": 1}},
            {"a": [1, 2], "b": 1.0, "c": math.nan, "d": {}},
        )
    )
    found = values(differences(first, second))
    assert found["hparams.b"] == (1, 1.0)
    assert found["hparams.d.x"] == (1, None)
    assert "hparams.c" not in found
    assert values(differences(*(Snapshot(objects={"notes": pack({"a": each})[0]}) for each in ((1,), [1]))))
    (found,) = differences(Snapshot(objects={"notes": None}), Snapshot()).values
    assert (found.section, found.kind) == ("notes", "only in the first")


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
