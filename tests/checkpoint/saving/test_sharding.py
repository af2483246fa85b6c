"""Written by any number of processes, read by any other: the same bits, and each writes its share once."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from tests.support.messages import heard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DamagedCheckpointError,
    DirectoryCheckpointIO,
    Snapshot,
    read_manifest,
    verify,
)
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.checkpoint.weights.module_state import load_module_state, module_state
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.own_loop_checkpoint import like_module, optimizer_state, restore_optimizer_state
from drivetrain.testing.distributed import run_distributed

if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)


class Model(nn.Module):
    """Sizes that no number of ranks divides, buffers, a scalar and an empty one among them."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(7, 11)
            self.norm = nn.BatchNorm1d(11)
            self.last = nn.Linear(11, 3, bias=False)
            self.register_buffer("empty", torch.empty(0, 5))

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def sharded(model):
    for child in (model.first, model.last):
        fully_shard(child)
    return fully_shard(model)


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = torch.arange(35.0).reshape(5, 7) / 30 + step
        F.cross_entropy(model(x), torch.tensor([0, 1, 2, 0, 1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, {"default": optimizer}


def snapshot_of(model, optimizers):
    weights, _ = module_state(model)
    slots, meta = optimizer_state(model, optimizers)
    return Snapshot({"model": weights, "optimizer": slots}, {"state": {"optimizers": meta}})


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(snapshot):
    """Every tensor, whole, as numpy bytes: for comparison between worlds."""
    return {
        f"{group}/{name}": (str(each.dtype), tuple(each.shape), full(each.detach()).numpy().tobytes())
        for group, named in snapshot.tensors.items()
        for name, each in named.items()
    }


def write(path):
    ranks = Ranks.of_job()
    snapshot = snapshot_of(*trained(sharded(Model()) if ranks.size > 1 else Model()))
    DirectoryCheckpointIO(ranks=ranks).save(path, snapshot)
    return flat(snapshot)


def read(path):
    ranks = Ranks.of_job()
    model = sharded(Model(seed=1)) if ranks.size > 1 else Model(seed=1)
    model, optimizers = trained(model)
    stored = DirectoryCheckpointIO(ranks=ranks).load(path, like=like_module(model))
    load_module_state(model, stored.tensors["model"], where="the test")
    meta = stored.objects["state"]["optimizers"]
    restore_optimizer_state(model, optimizers, stored.tensors["optimizer"], meta)
    return flat(snapshot_of(model, optimizers))


@pytest.fixture(scope="module")
def written():
    """One checkpoint for each number of processes, and what was in it."""
    with tempfile.TemporaryDirectory() as directory:
        found = {}
        for size in (1, 2, 3, 4):
            path = os.path.join(directory, f"by-{size}")
            found[size] = path, run_distributed(write, path, world_size=size)[0]
        yield found


@pytest.mark.parametrize("readers", [1, 2, 3, 4])
@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_any_number_of_processes_reads_what_any_other_wrote(written, writers, readers):
    path, expected = written[writers]
    for found in run_distributed(read, path, world_size=readers):
        assert found == expected
    verify(path)


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_the_whole_is_read_by_a_process_alone(written, writers):
    path, expected = written[writers]
    assert flat(DirectoryCheckpointIO().load(path)) == expected


@pytest.mark.parametrize("writers", [2, 3, 4])
def test_each_process_writes_its_share_and_nothing_twice(written, writers):
    path, expected = written[writers]
    manifest = read_manifest(path)
    for group in ("model", "optimizer"):
        stored = 0
        for name, record in manifest.tensors[group].items():
            _, shape, content = expected[f"{group}/{name}"]
            assert record.shape == shape
            stored += sum(torch.Size(piece.shape).numel() for piece in record.pieces) * (
                len(content) // max(1, torch.Size(shape).numel())
            )
        assert stored == sum(
            len(content) for key, (_, _, content) in expected.items() if key.startswith(group)
        )
    sizes = [
        os.path.getsize(os.path.join(path, name)) for name in manifest.files if name.startswith("optimizer-")
    ]
    assert len(sizes) == writers
    assert max(sizes) < 2 * min(sizes)


def test_what_is_replicated_is_spread_over_the_ranks(tmp_path):
    def act(path):
        ranks = Ranks.of_job()
        tensors = {f"w{number}": torch.full((100,), float(number)) for number in range(8)}
        DirectoryCheckpointIO(ranks=ranks).save(path, Snapshot({"model": tensors}))

    run_distributed(act, str(tmp_path / "c"), world_size=2)
    manifest = read_manifest(str(tmp_path / "c"))
    writers = [record.first for record in manifest.tensors["model"].values()]
    assert sorted(writers) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {record.count for record in manifest.tensors["model"].values()} == {1}


class Counting(LocalFileSystem):
    """Counts the bytes that are read from each file."""

    def __init__(self):
        self.bytes = {}

    def open(self, path):
        source, name = super().open(path), os.path.basename(path)
        read_into = source.read_into

        def counting(target):
            self.bytes[name] = self.bytes.get(name, 0) + len(target)
            return read_into(target)

        source.read_into = counting
        return source


def rows(whole):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return distribute_tensor(whole, mesh, [Shard(0)])


def test_a_reader_takes_only_its_own_bytes(tmp_path):
    def write_rows(path):
        tensors = {f"w{number}": rows(torch.ones(64, 64)) for number in range(3)}
        DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, Snapshot({"model": tensors}))

    def read_rows(path):
        files = Counting()
        pattern = rows(torch.zeros(64, 64))
        DirectoryCheckpointIO(files, Ranks.of_job()).load(path, like=lambda *_: pattern)
        return files.bytes

    path = str(tmp_path / "c")
    run_distributed(write_rows, path, world_size=4)
    share = 3 * 64 * 64 * 4 // 4
    for rank, read in enumerate(run_distributed(read_rows, path, world_size=4)):
        own = read.pop(f"model-{rank + 1:05d}-of-00004.safetensors")
        assert share < own < share + 500  # the header is read too
        assert set(read) == {"manifest.json", f"model-{rank + 1:05d}-of-00004.hashes.json"}
    # Two readers take two files each; those of the others they do not open.
    for read in run_distributed(read_rows, path, world_size=2):
        assert 2 * share < sum(count for name, count in read.items() if name.endswith(".safetensors"))
        assert len(read) == 5


def test_a_flipped_bit_in_one_shard_is_found_by_whoever_reads_it(written, tmp_path):
    path = str(tmp_path / "c")
    shutil.copytree(written[2][0], path)
    file = Path(path, "model-00002-of-00002.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for size in (1, 2, 4):
        with pytest.raises(RuntimeError, match=r"DamagedCheckpointError.*model-00002-of-00002"):
            run_distributed(read, path, world_size=size)


def test_tensors_that_differ_between_the_ranks_are_refused(tmp_path):
    def act(path):
        ranks = Ranks.of_job()
        tensors = {"w": torch.ones(2 + ranks.rank)}
        with pytest.raises(CheckpointError, match=r"rank 1 and rank 0 save different tensors: .*w: F32\[2\]"):
            DirectoryCheckpointIO(ranks=ranks).save(path, Snapshot({"model": tensors}))

    run_distributed(act, str(tmp_path / "c"))
    assert os.listdir(tmp_path) == []


def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path):
    def act(path):
        class Full(LocalFileSystem):
            def create(self, path):
                raise OSError(28, "No space left on device")

        ranks = Ranks.of_job()
        files = Full() if ranks.rank == 1 else None
        snapshot = Snapshot({"model": {f"w{number}": torch.ones(3) for number in range(4)}})
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*ENOSPC"):
            DirectoryCheckpointIO(files, ranks).save(path, snapshot)

    run_distributed(act, str(tmp_path / "c"))
    assert os.listdir(tmp_path) == []


def test_the_managers_of_all_ranks_agree(tmp_path):
    """A rank that finds its shard damaged makes all of them take the checkpoint before."""

    def life(directory):
        ranks = Ranks.of_job()
        manager = CheckpointManager(directory, CheckpointConfig(keep_last=3, best=0), ranks=ranks)
        model, optimizers = trained(sharded(Model()))
        for update in (1, 2, 3):
            for parameter in model.parameters():
                parameter.data.fill_(update)
            manager.save(update, 0, {}, lambda: snapshot_of(model, optimizers))
        return [entry.name for entry in manager.entries()]

    def resume(directory):
        ranks = Ranks.of_job()
        model = sharded(Model(seed=1))
        manager = CheckpointManager(directory, CheckpointConfig(keep_last=3, best=0), ranks=ranks)
        with heard() as caught:
            path, snapshot = manager.load_latest(like_module(model))
        values = set(full(snapshot.tensors["model"]["first.weight"]).flatten().tolist())
        return os.path.basename(path), values, caught

    directory = str(tmp_path / "checkpoints")
    names = run_distributed(life, directory)
    assert names[0] == names[1] == ["update-00000001", "update-00000002", "update-00000003"]
    file = Path(directory, names[0][2], "optimizer-00002-of-00002.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    (first, second) = run_distributed(resume, directory)
    assert first[:2] == second[:2] == ("update-00000002", {2.0})
    assert len(first[2]) == 1
    assert "was set aside as" in first[2][0]
    assert "optimizer-00002-of-00002" in first[2][0]
    assert second[2] == []


@pytest.mark.parametrize("kind", ["an empty directory", "none", "a file short", "a medium that fails"])
def test_a_rank_that_does_not_see_what_rank_0_sees_is_no_damage(tmp_path, kind):
    """As on a machine that has not mounted the directory: nothing is renamed, and nothing begins anew."""

    class Elsewhere(LocalFileSystem):
        def is_hidden(self, path):
            name, file = os.path.split(path)
            in_checkpoint = os.path.basename(name).startswith("update-")
            return {"none": "update-" in path, "an empty directory": in_checkpoint}.get(
                kind, in_checkpoint and file.startswith("model")
            )

        def kind(self, path):
            lacks = self.is_hidden(path) and kind != "a medium that fails"
            return None if lacks else super().kind(path)

        def entries(self, path):
            found = super().entries(path)
            return {
                name: each for name, each in found.items() if not self.is_hidden(os.path.join(path, name))
            }

        def open(self, path):
            if self.is_hidden(path):
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path)

    def life(directory):
        ranks = Ranks.of_job()
        manager = CheckpointManager(directory, CheckpointConfig(keep_last=3, best=0), ranks=ranks)
        for update in (1, 2):
            manager.save(update, 0, {}, lambda: Snapshot({"model": {"w": torch.ones(3)}}, {"state": {}}))
        files = Elsewhere() if ranks.rank == 1 else None
        manager = CheckpointManager(directory, CheckpointConfig(best=0), files=files, ranks=ranks)
        with pytest.raises(CheckpointError, match=r"rank 1 \(on .*\) finds '.*update-00000002") as caught:
            manager.load_latest()
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert "All ranks must see the same directory" in str(caught.value)

    run_distributed(life, str(tmp_path / "checkpoints"))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [
        "index.json",
        "update-00000001",
        "update-00000002",
    ]


def test_a_tensor_cut_along_both_dimensions_is_read_however_else_it_is_cut(tmp_path):
    def write_grid(path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        whole = torch.arange(63.0).reshape(9, 7)
        ranks = Ranks.of_job()
        grid = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        DirectoryCheckpointIO(ranks=ranks).save(path, Snapshot({"model": {"w": grid}}))

    def read_rows(path):
        mesh = init_device_mesh("cpu", (3,))
        pattern = distribute_tensor(torch.zeros(9, 7), mesh, [Shard(1)])
        io = DirectoryCheckpointIO(ranks=Ranks.of_job())
        found = io.load(path, like=lambda group, name, shape: pattern).tensors["model"]["w"]
        assert found.to_local().shape == pattern.to_local().shape
        return found.full_tensor().tolist()

    run_distributed(write_grid, str(tmp_path / "c"), world_size=4)
    whole = torch.arange(63.0).reshape(9, 7)
    assert len(read_manifest(str(tmp_path / "c")).tensors["model"]["w"].pieces) == 4
    assert torch.equal(DirectoryCheckpointIO().load(str(tmp_path / "c")).tensors["model"]["w"], whole)
    for found in run_distributed(read_rows, str(tmp_path / "c"), world_size=3):
        assert found == whole.tolist()
