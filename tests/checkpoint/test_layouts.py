"""Tensors on a mesh are stored as rules, and come back the same bits however they are sharded then."""

import pickle

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, read_manifest, verify
from drivetrain.checkpoint.saving.io import UnfinishedCheckpoint
from drivetrain.checkpoint.saving.sharding import plan_save
from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks

WORLD = 8


class Simulated(Ranks):  # one of several ranks, one after the other in this process; rank 0 comes first
    sent = b""

    def first(self, act):
        if self.rank == 0:
            type(self).sent = pickle.dumps(act())
        return pickle.loads(self.sent)

    def together(self, act):
        return [act()]


def as_rank(rank, act):
    torch.distributed.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        return act()
    finally:
        torch.distributed.destroy_process_group()


def sharded(whole, mesh, placements):  # what a rank holds of a tensor: torch says which box that is
    device_mesh = DeviceMesh("cpu", mesh)
    size, offset = compute_local_shape_and_global_offset(whole.shape, device_mesh, placements)
    box = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=False))
    local = whole[box].clone() if offset else whole.new_empty(0)
    like = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local, device_mesh, placements, run_check=False, **like)


LINE = torch.arange(8)
SQUARE = torch.arange(8).reshape(2, 4)
ORDERS = {
    "rows": (LINE, [Shard(0)]),
    "columns": (LINE, [Shard(1)]),
    "copied rows": (SQUARE, [Replicate(), Shard(0)]),
    "rows and copies": (SQUARE, [Shard(0), Replicate()]),
    "rows and columns": (SQUARE, [Shard(0), Shard(1)]),
    "columns and rows": (SQUARE, [Shard(1), Shard(0)]),
    "rows twice": (SQUARE, [Shard(0), Shard(0)]),
    "three": (torch.arange(8).reshape(2, 2, 2), [Shard(1), Replicate(), Shard(0)]),
    "turned": (SQUARE.T.contiguous(), [Shard(0), Shard(1)]),
    "some ranks": (torch.tensor([1, 3, 5]), [Shard(0)]),
}
SHAPES = [(9, 7), (16, 8), (3, 5), (8, 1)]


def save(path, whole, order):
    plans, shares = [], []
    place = UnfinishedCheckpoint(LOCAL, str(path), str(path))
    path.mkdir()
    for rank in range(WORLD):

        def act(rank=rank):
            tensors = {"w": sharded(whole, *order), "plain": whole, "count": torch.tensor(3)}
            plan = plan_save({"model": tensors}, (), Simulated(rank, WORLD))
            shares.append(place.write_share(plan, rank))
            return plan

        plans.append(as_rank(rank, act))
    place.write_rest(shares, plans[0], Snapshot(progress={"steps": 1}))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_any_mesh_holds_is_read_whole_and_on_another_mesh(tmp_path, shape):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    others = list(ORDERS)
    for number, order in enumerate(ORDERS):
        path = str(tmp_path / order)
        save(tmp_path / order, whole, ORDERS[order])
        verify(path)
        found = DirectoryCheckpointIO().load(path).tensors["model"]
        assert torch.equal(found["w"], whole), order
        assert torch.equal(found["plain"], whole), order

        other = ORDERS[others[(number + 4) % len(others)]]

        def read(path=path, other=other):
            pattern = sharded(torch.zeros(shape), *other)
            like = {"w": pattern, "plain": pattern}
            found = DirectoryCheckpointIO().load(path, like=lambda group, name, _: like.get(name))
            expected = sharded(whole, *other).to_local()
            assert torch.equal(found.tensors["model"]["w"].to_local(), expected)
            assert torch.equal(found.tensors["model"]["plain"].to_local(), expected)
            assert found.tensors["model"]["count"] == 3

        for rank in (0, 3, 7):
            as_rank(rank, read)


@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [3, 2, 1, 0], [0, 1, 3, 4]], ids=str)
def test_a_mesh_without_a_rule_is_refused(tmp_path, ranks):
    with pytest.raises(CheckpointError, match=r"model/w: its mesh .* rise by equal steps"):
        save(tmp_path / "c", torch.zeros(8, 3), (torch.tensor(ranks), [Shard(0)]))


def test_a_strided_shard_is_stored_as_the_boxes_that_it_is(tmp_path):  # FSDP over tensor parallelism
    whole = torch.arange(48.0).reshape(16, 3)
    save(tmp_path / "c", whole, (SQUARE, [_StridedShard(0, split_factor=4), Shard(0)]))
    layout = read_manifest(str(tmp_path / "c")).tensors["model"]["w"].layout
    assert layout.grid == (((4, 1), (2, 4)), ())
    assert torch.equal(DirectoryCheckpointIO().load(str(tmp_path / "c")).tensors["model"]["w"], whole)
