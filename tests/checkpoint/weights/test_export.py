"""Weights as plain files: replaced whole or not at all, and what everybody else's programs read."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.weights.models import Tied
from tests.support.fault_kinds import Fault, Killed
from tests.support.faults import FaultyFileSystem, read_bytes
from tests.support.memory import MemoryDisk, MemoryObjects
from tests.support.ranks import on_two_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, export_weights, load_weights
from drivetrain.checkpoint.weights.dtypes import FLOATS, cast, floating_dtype
from drivetrain.core.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"


def make(value, names="abc"):  # tensors of 16 bytes, so that a shard of 32 has two
    return {name: torch.full((4,), float(value)) for name in names}


def read_by_hand(directory):  # as a program does that knows nothing of us
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    if not (directory / INDEX).exists():
        return None
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return {name: load_file(directory / file)[name] for name, file in index["weight_map"].items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc to name a descriptor")
def test_the_file_is_durable_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch, helpers):
    recorded = helpers.record_syncs(monkeypatch)

    def events():
        found = [kind if kind == "replace" else os.path.basename(path) for kind, path in recorded]
        recorded.clear()
        return found

    export_weights({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert events() == ["model.safetensors", "replace", tmp_path.name, tmp_path.name]
    export_weights(make(1), tmp_path / "parts" / "model.safetensors", max_shard_size=32)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    found = events()
    assert [each for each in found if each.startswith("model")] == [*shards, INDEX]
    # The index gets its name only when the shards surely have theirs.
    assert found[-5:] == ["replace", "parts", "replace", "parts", "parts"]


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


@pytest.mark.parametrize("storage", [MemoryDisk, MemoryObjects])
@pytest.mark.parametrize("new", [48, 16], ids=["to one", "to three"])
@pytest.mark.parametrize("old", [None, 48, 32, 16], ids=["nothing", "one", "two", "three"])
def test_a_killed_export_leaves_nothing_that_loads_wrong(tmp_path, old, new, storage):
    before, after, path = make(1), make(2), "/w/model.safetensors"
    outcomes = set()
    for moment in range(1, 200):
        files, place = storage(), tmp_path / str(moment)
        if old is not None:
            export_weights(before, path, max_shard_size=old, files=files)
        try:
            kind = "power cut" if files.renames else "kill"
            faulty = FaultyFileSystem(files, Fault(moment, kind, moment), root="/w")
            export_weights(after, path, max_shard_size=new, files=faulty)
        except Killed:
            pass
        else:
            break
        place.mkdir()
        for name, kind in files.entries("/w").items() if files.kind("/w") else ():
            if kind == "file":
                (place / name).write_bytes(read_bytes(files, f"/w/{name}"))
        found = read_by_hand(place)
        outcomes.add("nothing" if found is None else "old" if same(found, before) else "new")
        assert found is None or same(found, before) or same(found, after)
        # Nor for those who take whatever is there.
        versions = {float(each[0]) for file in place.glob("model-*") for each in load_file(file).values()}
        assert len(versions) <= 1
        try:
            assert same(load_weights(place), found)
        except CheckpointError:
            assert found is None
        # The next export puts everything in order, also one of another kind.
        written = export_weights(after, path, max_shard_size=(new, 48)[moment % 2], files=files)
        assert sorted(files.entries("/w")) == sorted(map(os.path.basename, written))
    else:
        pytest.fail("it never ends")
    assert moment > 5
    assert outcomes <= ({"nothing", "new"} if old is None else {"nothing", "old", "new"})


def test_the_files_of_a_checkpoint_are_not_overwritten(tmp_path):
    io = DirectoryCheckpointIO()
    io.save(str(tmp_path / "kept"), Snapshot({"model": make(1)}, {}))
    with pytest.raises(CheckpointError, match=r"model.safetensors' is beside a manifest.json.*another dir"):
        export_weights(make(2), tmp_path / "kept" / "model.safetensors")
    assert same(io.load(str(tmp_path / "kept")).tensors["model"], make(1))


def test_a_dtype_may_be_given_in_any_of_its_names():
    assert floating_dtype(None) is None
    for name, dtype in FLOATS.items():
        assert floating_dtype(name) is floating_dtype(dtype) is floating_dtype(f"torch.{name}") is dtype


def test_cast_never_makes_a_finite_number_infinite():
    for source in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        tensor = torch.tensor([1.0, 2.0**17], dtype=torch.float64).to(source)
        with pytest.raises(CheckpointError, match=r"it has the number 131072, but .* torch.float16"):
            cast(tensor, torch.float16, "it")
        if source != torch.float8_e8m0fnu:
            with pytest.raises(CheckpointError, match=r"the number -131072"):
                cast(-tensor, torch.float16, "it")
    # Rounding up to infinity counts, and rounding down to the end does not.
    assert cast(torch.tensor([65519.0]), torch.float16, "it").item() == 65504
    with pytest.raises(CheckpointError, match=r"the number 65520"):
        cast(torch.tensor([65520.0]), torch.float16, "it")


gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def whole():
    return {
        "rows": torch.arange(35.0).reshape(7, 5),
        "columns": torch.arange(12.0, dtype=torch.float64).reshape(3, 4),
        "copied": torch.tensor([1.5, 2.5]),
        "one": torch.tensor([[7.0]]),  # the second process has nothing of it
        "plain": torch.tensor([3, 4]),
    }


def write(export, path, **options):
    mesh = init_device_mesh("cpu", (2,))
    tensors = whole()
    for name, cut in {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "one": Shard(0)}.items():
        tensors[name] = distribute_tensor(tensors[name], mesh, [cut]).requires_grad_()
    return export(tensors, path, write=torch.distributed.get_rank() == 0, **options)


@gloo
@pytest.mark.parametrize("limit", ["1 GB", 60], ids=["one file", "several"])
def test_sharded_weights_are_exported_whole_by_one_process(tmp_path, limit):
    path = str(tmp_path / "model.safetensors")
    first, second = on_two_ranks(lambda: write(export_weights, path, dtype="bf16", max_shard_size=limit))
    assert first == second == [str(each) for each in sorted(tmp_path.iterdir())]
    found = {}
    for file in tmp_path.glob("*.safetensors"):
        found.update(load_file(file))
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in whole().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@gloo
def test_a_process_that_cannot_write_leaves_nobody_waiting(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "model.safetensors").mkdir()

    def fail(path, options):
        mesh = init_device_mesh("cpu", (2,))
        tensors = {f"t{number}": torch.full((4, 4), 1e6) for number in range(3)}
        sharded = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}
        if torch.distributed.get_rank() == 0:
            with pytest.raises((CheckpointError, ConfigError)):
                export_weights(sharded, path, **options)
        else:
            export_weights(sharded, path, write=False, **options)
        # Still in step with one another.
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total.item() == 2

    for path, options in (("file/w", {}), ("w", {"dtype": "fp16"}), ("model.safetensors", {})):
        assert on_two_ranks(fail, str(tmp_path / path), options) == [True, True]
        assert sorted(os.listdir(tmp_path)) == ["file", "model.safetensors"]
