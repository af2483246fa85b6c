"""Checkpoints described, listed and compared: what counts as a difference, and how large it is."""

import math

import pytest
import torch
from tests.checkpoint.make_corpus import CORPUS

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.inspection import compare as comparison
from drivetrain.checkpoint.inspection.compare import compare
from drivetrain.checkpoint.saving.index import PURPOSE


@pytest.fixture
def differences(tmp_path):
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


def test_tensors_that_other_numbers_of_processes_have_saved_are_the_same():
    assert list(compare(*(str(CORPUS / "v4" / f"sharded-by-{size}") for size in (1, 4))).tensors) == []


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
