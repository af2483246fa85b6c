"""Written by any number of processes, read by any other: the same bits, and each writes its share once."""

import errno
import os
import shutil

import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn import functional as F

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.io import read_manifest, verify
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, LocalFileSystem
from drivetrain.checkpoint.weights.module_state import load_module_state, module_state
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.engine.own_loop_checkpoint import like_module, optimizer_state, restore_optimizer_state

if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)


class Model(nn.Module):  # sizes that no number of ranks divides; buffers, a scalar, an empty one
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
    if Ranks.of_job().size > 1:
        for child in (model.first, model.last):
            fully_shard(child)
        fully_shard(model)
    return model


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


def flat(snapshot):  # every tensor, whole, as numpy bytes: for comparison between worlds
    return {
        f"{group}/{name}": (str(each.dtype), tuple(each.shape), full(each.detach()).numpy().tobytes())
        for group, named in snapshot.tensors.items()
        for name, each in named.items()
    }


def write(path):
    snapshot = snapshot_of(*trained(sharded(Model())))
    DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, snapshot)
    return flat(snapshot)


def read(*paths):  # what the model and the optimizer are after loading each
    found = []
    for path in paths:
        model, optimizers = trained(sharded(Model(seed=1)))
        stored = DirectoryCheckpointIO(ranks=Ranks.of_job()).load(path, like=like_module(model))
        load_module_state(model, stored.tensors["model"], where="the test")
        meta = stored.objects["state"]["optimizers"]
        restore_optimizer_state(model, optimizers, stored.tensors["optimizer"], meta)
        found.append(flat(snapshot_of(model, optimizers)))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):  # a checkpoint of one process and one of two, and what was in each
    paths = [str(tmp_path_factory.mktemp("written") / str(size)) for size in (1, 2)]
    return paths, [write(paths[0]), on_two_ranks(write, paths[1])[0]]


def test_one_process_and_two_read_what_one_and_two_have_written(written):
    paths, expected = written
    assert read(*paths) == expected
    assert on_two_ranks(read, *paths) == [expected, expected]
    for path, each in zip(paths, expected, strict=True):
        assert flat(DirectoryCheckpointIO().load(path)) == each
        verify(path)


def test_each_process_writes_its_share_and_nothing_twice(written, tmp_path):
    manifest = read_manifest(written[0][1])
    for group in ("model", "optimizer"):
        stored = 0
        for name, record in manifest.tensors[group].items():
            _, shape, content = written[1][1][f"{group}/{name}"]
            assert record.shape == shape
            size = len(content) // max(1, torch.Size(shape).numel())
            stored += sum(torch.Size(piece.shape).numel() for piece in record.pieces) * size
        assert stored == sum(len(each[2]) for key, each in written[1][1].items() if key.startswith(group))
    names = [name for name in manifest.files if name.startswith("optimizer")]
    smaller, larger = sorted(os.path.getsize(os.path.join(written[0][1], name)) for name in names)
    assert larger < 2 * smaller

    def replicated(path):
        tensors = {f"w{number}": torch.full((100,), float(number)) for number in range(8)}
        own = {f"s{number}": torch.full((3,), float(Ranks.of_job().rank)) for number in range(4)}
        snapshot = Snapshot({"model": tensors, "state": own}, {"state": {}})
        DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, snapshot)

    on_two_ranks(replicated, str(tmp_path / "c"))
    state = DirectoryCheckpointIO().load(str(tmp_path / "c")).tensors["state"]
    assert torch.stack(list(state.values())).count_nonzero() == 0  # what differs between ranks is rank 0's
    records = read_manifest(str(tmp_path / "c")).tensors["model"].values()
    assert sorted(record.first for record in records) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {record.count for record in records} == {1}


def rows(number):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return distribute_tensor(torch.full((64, 64), float(number)), mesh, [Shard(0)])


def test_a_reader_takes_only_its_own_bytes(tmp_path):
    class Counting(LocalFileSystem):
        def __init__(self):
            self.bytes = {}

        def open(self, path):
            source, name = super().open(path), os.path.basename(path)
            readinto = source.readinto

            def counting(target):
                self.bytes[name] = self.bytes.get(name, 0) + len(target)
                return readinto(target)

            source.readinto = counting
            return source

    def act(path):
        tensors = {f"w{number}": rows(1.0) for number in range(3)}
        DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, Snapshot({"model": tensors}))
        files, pattern = Counting(), rows(0.0)
        DirectoryCheckpointIO(files, Ranks.of_job()).load(path, like=lambda *_: pattern)
        return files.bytes

    share = 3 * 64 * 64 * 4 // 2
    for rank, found in enumerate(on_two_ranks(act, str(tmp_path / "c"))):
        own = found.pop(f"model-{rank + 1:05d}-of-00002.safetensors")
        assert share < own < share + 500  # the header is read too
        assert set(found) == {"manifest.json", f"model-{rank + 1:05d}-of-00002.hashes.json"}


def test_shards_that_would_be_saved_or_read_wrong_are_refused(tmp_path):
    def act(directory):
        ranks, mesh, whole = Ranks.of_job(), init_device_mesh("cpu", (2,)), torch.ones(4, 4)
        good = f"{directory}/good"

        def save(tensor, path=f"{directory}/c", ranks=ranks):
            DirectoryCheckpointIO(ranks=ranks).save(path, Snapshot({"model": {"w": tensor}}))

        def held(local, placement):
            return DTensor.from_local(local, mesh, [placement], run_check=False, shape=(4, 4), stride=(4, 1))

        save(rows(1), good)
        other = distribute_tensor(whole, mesh, [Shard(0)])
        mixed = held(whole.chunk(2, ranks.rank)[0], Shard(ranks.rank))
        assert_refused(
            CheckpointError,
            {
                "cut otherwise by a rank": (lambda: save(mixed), "Shard it the same way on every rank"),
                "partial": (lambda: save(held(whole, Partial())), "Partial", "redistribute"),
                "by one process": (lambda: save(other, ranks=ALONE), "but one process saves it"),
                "of another shape": (
                    lambda: DirectoryCheckpointIO(ranks=ranks).load(good, like=lambda *_: other),
                    "[64, 64] in the checkpoint",
                ),
            },
        )

    on_two_ranks(act, str(tmp_path))
    assert os.listdir(tmp_path) == ["good"]


def test_managers_agree_on_the_checkpoint_before_a_shard_that_one_rank_finds_damaged(tmp_path):
    def manager(directory):
        return CheckpointManager(directory, CheckpointConfig(best=0), ranks=Ranks.of_job())

    def life(directory):
        saving = manager(directory)
        for step in (1, 2):
            content = Snapshot({"model": {"w": rows(step)}}, {"state": {}})
            saving.save(step, 0, {}, lambda content=content: content)

    def resume(directory):
        with heard() as texts:
            path, snapshot = manager(directory).load_latest(lambda *_: rows(0))
        return os.path.basename(path), snapshot.tensors["model"]["w"].to_local().unique().tolist(), texts

    on_two_ranks(life, str(tmp_path))
    file = tmp_path / "step-00000002" / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(DamagedCheckpointError, match=file.name):
        DirectoryCheckpointIO().load(str(file.parent))
    for each in (tmp_path / "step-00000001").glob("model-00002*"):  # good in itself, with its own hashes
        shutil.copy(each, file.parent)
    first, second = on_two_ranks(resume, str(tmp_path))
    assert first[:2] == second[:2] == ("step-00000001", [1.0])
    assert (len(first[2]), second[2]) == (1, [])
    assert "was set aside as" in first[2][0]
    assert "model-00002-of-00002.hashes.json" in first[2][0]


def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_nothing(tmp_path):
    class Full(LocalFileSystem):
        def create(self, path):
            raise OSError(28, "No space left on device")

    def differ(path):
        ranks = Ranks.of_job()
        tensors = {"w": torch.ones(2 + ranks.rank)}
        with pytest.raises(CheckpointError, match=r"rank 1 and rank 0 save different tensors: .*w: F32\[2\]"):
            DirectoryCheckpointIO(ranks=ranks).save(path, Snapshot({"model": tensors}))

    def fail(path):
        ranks = Ranks.of_job()
        snapshot = Snapshot({"model": {f"w{number}": torch.ones(3) for number in range(4)}})
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002.*ENOSPC"):
            DirectoryCheckpointIO(Full() if ranks.rank == 1 else None, ranks).save(path, snapshot)

    for act in (differ, fail):
        on_two_ranks(act, str(tmp_path / "c"))
        assert os.listdir(tmp_path) == []


def test_a_rank_that_does_not_see_what_rank_0_sees_is_no_damage(tmp_path):
    class Elsewhere(LocalFileSystem):  # as on a machine that has not mounted the directory
        def __init__(self, lacks):
            self.lacks = lacks

        def kind(self, path):
            return None if self.lacks == "none" and "step-" in path else super().kind(path)

        def open(self, path):
            if "step-" in path and (self.lacks == "none" or "model" in os.path.basename(path)):
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path)

    def life(directory, lacks):
        ranks = Ranks.of_job()
        manager = CheckpointManager(directory, CheckpointConfig(keep_last=3, best=0), ranks=ranks)
        for step in (1, 2):
            manager.save(step, 0, {}, lambda: Snapshot({"model": {"w": torch.ones(3)}}, {"state": {}}))
        files = Elsewhere(lacks) if ranks.rank == 1 else None
        manager = CheckpointManager(directory, CheckpointConfig(best=0), files=files, ranks=ranks)
        with pytest.raises(CheckpointError, match=r"rank 1 \(on .*\) finds '.*step-00000002") as caught:
            manager.load_latest()
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert "All ranks must see the same directory" in str(caught.value)

    for lacks in ("none", "a medium that fails"):
        on_two_ranks(life, str(tmp_path / lacks), lacks)
        assert sorted(os.listdir(tmp_path / lacks)) == ["index.json", "step-00000001", "step-00000002"]
