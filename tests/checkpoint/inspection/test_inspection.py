"""Checkpoints described, listed and compared: what counts as a difference."""

import math

import pytest
import torch
from tests.checkpoint.make_corpus import CORPUS

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.inspection.compare import compare
from drivetrain.checkpoint.saving.index import PURPOSE


@pytest.fixture
def differences(tmp_path):
    count = iter(range(100))

    def run(first, second):
        paths = [str(tmp_path / str(next(count))) for _ in range(2)]
        for path, snapshot in zip(paths, (first, second), strict=True):
            DirectoryCheckpointIO().save(path, snapshot)
        return compare(*paths)

    return run


def model(tensor):
    return Snapshot({"model": {"w": tensor}})


def values(found):
    return {f"{each.section}.{each.name}": (each.first, each.second) for each in found.values}


def test_the_bits_of_a_tensor_count_and_its_shape_and_dtype_too(differences):
    weights = torch.tensor([0.0, math.nan])
    kinds = {
        None: weights.clone(),
        "content": torch.tensor([-0.0, math.nan]),
        "dtype": weights.bfloat16(),
        "shape": torch.tensor([[0.0, math.nan]]).double(),
    }
    for kind, other in kinds.items():
        found = differences(model(weights), model(other)).tensors
        assert [each.kind for each in found] == ([] if kind is None else [kind])


def test_tensors_that_other_numbers_of_processes_have_saved_are_the_same():
    assert list(compare(*(str(CORPUS / "v1" / f"sharded-by-{size}") for size in (1, 4))).tensors) == []


def test_time_and_purpose_are_no_differences_and_settings_of_optimizers_are(differences):
    def run(seconds, rate=0.1, names=("a", "b")):
        optimizer = {"optimizer": "SGD", "groups": [{"lr": rate, "parameters": list(names)}]}
        state = {"timing": {"data": seconds}, "optimizers": {"default": optimizer}}
        objects = {"state": state, PURPOSE: {"order": int(seconds)}}
        return Snapshot(objects=objects, progress={"steps": 3, "seconds": seconds})

    assert differences(run(1.0), run(2.0)).is_same
    assert values(differences(run(1.0), run(1.0, 0.2, "abc"))) == {
        "optimizers.default.groups.0.lr": (0.1, 0.2),
        "optimizers.default.groups.0.parameters.2": (None, "c"),
    }
