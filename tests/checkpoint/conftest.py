"""Parts that the checkpoint tests share: a snapshot with everything in it, and a comparison bit for bit."""

from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack


def same_bits(left, right):
    """Whether two tensors are equal in dtype, shape and every bit."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    raw = [each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(*raw)


def same_snapshot(left, right):
    """Whether two snapshots hold the same, bit for bit; `repr` because NaN differs from itself."""
    return (
        {group: list(tensors) for group, tensors in left.tensors.items()}
        == {group: list(tensors) for group, tensors in right.tensors.items()}
        and all(
            same_bits(each, right.tensors[g][n]) for g, ts in left.tensors.items() for n, each in ts.items()
        )
        and repr((left.objects, left.progress, left.metrics, left.task))
        == repr((right.objects, right.progress, right.metrics, right.task))
    )


def make_snapshot(value=1.0, size=8):
    """A small snapshot whose content tells `value`."""
    state, tensors = pack({"rng": torch.full((size,), value), "order": (1, 2), "best": float("inf")})
    return Snapshot(
        tensors={
            "model": {"weight": torch.full((size, 3), value), "bias": torch.full((3,), -value)},
            "optimizer": {"weight/exp_avg": torch.full((size, 3), value / 2)},
            "state": tensors,
        },
        objects={"state": state, "hparams": {"hidden": 3}},
        progress={"updates": int(value), "epoch": 0},
        metrics={"validation/loss": 0.5, "train/loss": float("nan")},
        task="Digits",
    )


@pytest.fixture
def helpers():
    """The functions above, since a test module cannot import its conftest."""
    from types import SimpleNamespace

    return SimpleNamespace(same_bits=same_bits, same_snapshot=same_snapshot, make_snapshot=make_snapshot)


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "checkpoints" / "update-00000001"
    DirectoryCheckpointIO().save(str(path), make_snapshot())
    return path
