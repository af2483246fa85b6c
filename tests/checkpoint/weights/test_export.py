"""Weights as plain files: replaced whole or not at all, and what everybody else's programs read."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.weights.models import Tied

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, export_weights, load_weights
from drivetrain.checkpoint.storage.filesystem import LocalFileSystem
from drivetrain.core.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def make(value, names="abc"):
    """Tensors of 16 bytes, so that a shard of 32 has two."""
    return {name: torch.full((4,), float(value)) for name in names}


def read_by_hand(directory):
    """As a program does that knows nothing of us: the single file, else what the index says."""
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    if not (directory / INDEX).exists():
        return None
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return {name: load_file(directory / file)[name] for name, file in index["weight_map"].items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name a descriptor")
def test_the_file_is_durable_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    export_weights({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert events == [".saving-model.safetensors", "replace", tmp_path.name]
    events.clear()
    export_weights(make(1), tmp_path / "parts" / "model.safetensors", max_shard_size=32)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert [each for each in events if each.startswith("model")] == [*shards, INDEX]
    # The index gets its name only when the shards surely have theirs.
    assert events[-5:] == ["replace", "parts", "replace", "parts", "parts"]


@pytest.mark.parametrize("limit", ["50 GB", 100], ids=["one file", "several"])
def test_a_model_with_tied_weights_loads_strictly_without_this_package(tmp_path, limit):
    model, other = Tied(), Tied()
    written = export_weights(model.state_dict(), tmp_path / "model.safetensors", max_shard_size=limit)
    assert written == [str(path) for path in sorted(tmp_path.iterdir())]
    other.load_state_dict(read_by_hand(tmp_path), strict=True)
    assert same(other.state_dict(), model.state_dict())


def test_dtype_converts_only_floating_point_tensors(tmp_path):
    kept = {"count": torch.tensor([1 << 60]), "rotary": torch.ones(2, dtype=torch.complex64) * 1j}
    kept["mask"] = torch.tensor([True, False])
    tensors = {"w": torch.tensor([1.0, 1 / 3]), "h": torch.ones(3, dtype=torch.float64), **kept}
    export_weights(tensors, tmp_path / "w.safetensors", dtype="bf16")
    found = load_file(tmp_path / "w.safetensors")
    assert same(found, {"w": tensors["w"].bfloat16(), "h": torch.ones(3, dtype=torch.bfloat16), **kept})
    export_weights(tensors, tmp_path / "w.safetensors", dtype=torch.float64)
    assert load_file(tmp_path / "w.safetensors")["w"].tolist() == tensors["w"].double().tolist()
    # Sizes are those of the converted tensors.
    assert len(export_weights(make(1), tmp_path / "model.safetensors", max_shard_size=24)) == 4
    assert len(export_weights(make(1), tmp_path / "model.safetensors", max_shard_size=24, dtype="fp16")) == 1


def test_files_of_an_earlier_export_that_no_longer_belong_are_removed(tmp_path):
    target = tmp_path / "model.safetensors"
    strangers = ["pytorch_model.bin", "other-00001-of-00002.safetensors", "model-1-of-2.safetensors"]
    for name in strangers:
        (tmp_path / name).write_bytes(b"")
    for number, (limit, count) in enumerate([(16, 3), ("1 GB", 0), (32, 2), (16, 3), (32, 2), (48, 0)]):
        tensors = make(number)
        written = export_weights(tensors, target, max_shard_size=limit)
        assert len(written) == (count + 1 if count else 1)
        assert sorted(os.listdir(tmp_path)) == sorted([*strangers, *map(os.path.basename, written)])
        assert same(read_by_hand(tmp_path), tensors)


class Killed(BaseException):
    """The process is gone; no Exception, because nothing may handle it."""


class Mortal(LocalFileSystem):
    """A disk, or a store whose files appear whole and overwrite, under a process that dies at a moment.

    Args:
        moment: The number of the change to the disk at which it dies, half-way where it can be.
        renames: Whether it is a disk.
        scratch: Where a store keeps what has not appeared.
    """

    def __init__(self, moment, renames, scratch):
        self.left = moment
        self.renames = renames
        self.scratch = scratch

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise Killed

    def create(self, path):
        self.count()
        hidden = path if self.renames else str(self.scratch / "object")
        if not self.renames:
            Path(hidden).unlink(missing_ok=True)
        sink = super().create(hidden)
        write, finish = sink.write, sink.finish

        def die_or_write(data):
            if self.left == 0:
                write(data[: len(data) // 2])
            self.count()
            return write(data)

        def die_or_finish():
            try:
                self.count()
            except Killed:
                sink.abort()  # the system closes the files of the dead
                raise
            finish()
            os.replace(hidden, path)

        sink.write, sink.finish = die_or_write, die_or_finish
        return sink


def dying(name):
    def change(self, *paths):
        self.count()
        getattr(LocalFileSystem, name)(self, *paths)

    return change


for each in ("make_directory", "rename", "delete"):
    setattr(Mortal, each, dying(each))


@pytest.mark.parametrize("renames", [True, False], ids=["disk", "object store"])
@pytest.mark.parametrize("new", [48, 16], ids=["to one", "to three"])
@pytest.mark.parametrize("old", [None, 48, 32, 16], ids=["nothing", "one", "two", "three"])
def test_a_killed_export_leaves_nothing_that_loads_wrong(tmp_path, old, new, renames):
    before, after = make(1), make(2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    outcomes = set()
    for moment in range(200):
        place = tmp_path / str(moment)
        place.mkdir()
        if old is not None:
            export_weights(before, place / "model.safetensors", max_shard_size=old)
        try:
            files = Mortal(moment, renames, scratch)
            export_weights(after, place / "model.safetensors", max_shard_size=new, files=files)
        except Killed:
            pass
        else:
            break
        found = read_by_hand(place)
        outcomes.add("nothing" if found is None else "old" if same(found, before) else "new")
        assert found is None or same(found, before) or same(found, after)
        # Nor for those who take whatever is there.
        versions = {float(each[0]) for path in place.glob("model-*") for each in load_file(path).values()}
        assert len(versions) <= 1
        try:
            assert same(load_weights(place), found)
        except CheckpointError:
            assert found is None
        # The next export puts everything in order, also one of another kind.
        for limit, names in ((new, 1 if new == 48 else 4), (48, 1)):
            shutil.copytree(place, place / "copy")
            files = Mortal(1000, renames, scratch)
            target = place / "copy" / "model.safetensors"
            written = export_weights(after, target, max_shard_size=limit, files=files)
            assert sorted(os.listdir(place / "copy")) == sorted(map(os.path.basename, written))
            assert len(written) == names
            shutil.rmtree(place / "copy")
        shutil.rmtree(place)
    else:
        pytest.fail("it never ends")
    assert moment > 5
    assert outcomes <= ({"nothing", "new"} if old is None else {"nothing", "old", "new"})


def test_the_files_of_a_checkpoint_are_not_overwritten(tmp_path):
    io = DirectoryCheckpointIO()
    io.save(str(tmp_path / "kept"), Snapshot({"model": make(1)}, {}))
    with pytest.raises(
        CheckpointError, match=r"model.safetensors' is inside a checkpoint.*another directory"
    ):
        export_weights(make(2), tmp_path / "kept" / "model.safetensors")
    assert same(io.load(str(tmp_path / "kept")).tensors["model"], make(1))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text("{}", encoding="utf-8")  # others have such files too
    export_weights(make(2), tmp_path / "site" / "model.safetensors")


def test_a_quantised_tensor_is_refused_by_name_and_nothing_is_written(tmp_path):
    quantisation = pytest.importorskip("torchao.quantization")
    module = torch.nn.Sequential(torch.nn.Linear(8, 4))
    quantisation.quantize_(module, quantisation.IntxWeightOnlyConfig(torch.int4, quantisation.PerAxis(0)))
    with pytest.raises(CheckpointError, match=r"'0\.weight': a IntxUnpacked.*export_torch"):
        export_weights(module.state_dict(), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
