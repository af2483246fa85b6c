"""Weights of several processes: each is gathered once, by all, and one process writes."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.support.ranks import on_two_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from drivetrain.checkpoint import export_torch, export_weights
from drivetrain.core.errors import CheckpointError, ConfigError

if not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)


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


def test_a_process_that_cannot_write_leaves_nobody_waiting(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "model.safetensors").mkdir()

    def fail(export, path, options):
        mesh = init_device_mesh("cpu", (2,))
        tensors = {f"t{number}": torch.full((4, 4), 1e6) for number in range(3)}
        sharded = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in tensors.items()}
        if torch.distributed.get_rank() == 0:
            with pytest.raises((CheckpointError, ConfigError)):
                export(sharded, path, **options)
        else:
            export(sharded, path, write=False, **options)
        # Still in step with one another.
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total.item() == 2

    for export in (export_weights, export_torch):
        for path, options in (("file/w", {}), ("w", {"dtype": "fp16"}), ("model.safetensors", {})):
            assert on_two_ranks(fail, export, str(tmp_path / path), options) == [True, True]
            assert sorted(os.listdir(tmp_path)) == ["file", "model.safetensors"]
