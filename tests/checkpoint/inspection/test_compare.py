"""Two checkpoints side by side: what counts as a difference, and how large it is said to be."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack
from drivetrain.checkpoint.inspection import compare as comparison
from drivetrain.checkpoint.inspection.compare import compare
from drivetrain.checkpoint.inspection.description import open_checkpoint
from drivetrain.checkpoint.saving.index import PURPOSE
from drivetrain.distributed.ranks import Ranks
from drivetrain.testing.distributed import run_distributed


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


def model(**tensors):
    return Snapshot({"model": tensors})


def values(found):
    return {f"{each.section}.{each.name}": (each.first, each.second) for each in found.values}


@pytest.mark.parametrize(
    ("first", "second", "max_abs", "relative"),
    [
        ([3.0, 4.0], [3.0, 4.5], 0.5, 0.1),
        ([0.0, 0.0], [0.0, 1.0], 1.0, math.inf),
        ([0.0], [-0.0], 0.0, 0.0),
        ([math.inf, 1.0], [math.inf, 2.0], 1.0, 1.0),
        ([math.nan, 1.0], [math.nan, 2.0], 1.0, 1.0),
        ([math.inf, 1.0], [2.0, 1.0], math.inf, math.inf),
    ],
)
def test_how_far_apart(differences, first, second, max_abs, relative):
    found = differences(model(w=torch.tensor(first)), model(w=torch.tensor(second)), values=True)
    assert (found.tensors[0].max_abs, found.tensors[0].relative) == pytest.approx((max_abs, relative))


def test_not_a_number_in_one_alone_is_said(differences):
    found = differences(
        model(w=torch.tensor([1.0, math.nan])), model(w=torch.tensor([1.0, 2.0])), values=True
    )
    assert math.isnan(found.tensors[0].max_abs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
def test_every_kind_of_number_is_measured(differences, dtype):
    first, second = torch.tensor([0, 1]).to(dtype), torch.tensor([0, 0]).to(dtype)
    assert differences(model(w=first), model(w=second), values=True).tensors[0].max_abs == 1.0


def test_other_dtypes_of_one_shape_are_measured_too(differences):
    weights = torch.tensor([1.0, 1.001])
    found = differences(model(w=weights), model(w=weights.bfloat16()), values=True).tensors[0]
    assert found.kind == "dtype"
    assert found.max_abs == pytest.approx(0.001, rel=1e-3)


def test_large_tensors_are_measured_piece_by_piece_and_alone(differences, monkeypatch):
    monkeypatch.setattr(comparison, "_CHUNK", 3)
    monkeypatch.setattr(comparison, "_AT_ONCE", 0)
    first = torch.arange(10.0)
    second = first.clone()
    second[7] += 2.0
    found = differences(model(w=first), model(w=second), values=True).tensors[0]
    assert (found.max_abs, found.relative) == (2.0, pytest.approx(2.0 / first.norm().item()))


def save_rows(path, whole):
    """Save a tensor of which each process holds some rows."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, model(w=rows))


def test_what_is_stored_in_other_pieces_is_read(tmp_path):
    sharded, same, other = (str(tmp_path / name) for name in ("sharded", "same", "other"))
    whole = torch.arange(10.0).reshape(5, 2)
    run_distributed(save_rows, sharded, whole, world_size=2)
    DirectoryCheckpointIO().save(same, model(w=whole))
    DirectoryCheckpointIO().save(other, model(w=whole + torch.eye(5, 2)))
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
    only_tuple = [Snapshot(objects={"notes": pack(each)[0]}) for each in ({"a": (1,)}, {"a": [1]})]
    assert values(differences(*only_tuple))


def test_time_and_purpose_are_no_differences(differences):
    first, second = (
        Snapshot(
            objects={"state": {"timing": {"data": seconds}}, PURPOSE: {"order": int(seconds)}},
            progress={"updates": 3, "seconds": seconds},
        )
        for seconds in (1.0, 2.0)
    )
    assert differences(first, second).is_same


def test_optimizer_settings_and_their_parameters(differences):
    def run(rate, *names):
        groups = [{"lr": rate, "parameters": list(names)}]
        return Snapshot(
            objects={"state": {"optimizers": {"default": {"optimizer": "SGD", "groups": groups}}}}
        )

    found = values(differences(run(0.1, "a", "b"), run(0.2, "b", "a", "c")))
    assert found == {
        "optimizers.default.groups.0.lr": (0.1, 0.2),
        "optimizers.default.groups.0.parameters.c": (None, True),
    }


def test_an_object_in_one_alone(differences):
    (found,) = differences(Snapshot(objects={"notes": None}), Snapshot()).values
    assert (found.section, found.kind) == ("notes", "only in the first")
