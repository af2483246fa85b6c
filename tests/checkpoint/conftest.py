"""Parts that the checkpoint tests share: a snapshot with everything in it, and a comparison bit for bit."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack


def same_bits(left, right):  # whether two tensors are equal in dtype, shape and every bit
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    raw = [each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(*raw)


def same_snapshot(left, right):  # bit for bit; `repr` because NaN differs from itself
    names, others = ({group: list(ts) for group, ts in each.tensors.items()} for each in (left, right))
    rest, other = (repr((s.objects, s.progress, s.metrics, s.task)) for s in (left, right))
    return (names, rest) == (others, other) and all(
        same_bits(each, right.tensors[g][n]) for g, ts in left.tensors.items() for n, each in ts.items()
    )


def make_snapshot(value=1.0, size=8):  # a small snapshot whose content tells `value`
    state, tensors = pack({"rng": torch.full((size,), value), "order": (1, 2), "best": float("inf")})
    return Snapshot(
        tensors={
            "model": {"weight": torch.full((size, 3), value), "bias": torch.full((3,), -value)},
            "optimizer": {"weight/exp_avg": torch.full((size, 3), value / 2)},
            "state": tensors,
        },
        objects={"state": state, "hparams": {"hidden": 3}},
        progress={"steps": int(value), "epoch": 0},
        metrics={"validation/loss": 0.5, "train/loss": float("nan")},
        task="Digits",
    )


def record_syncs(monkeypatch):  # the list that gets each ("sync", path) and ("replace", source)
    events, fsync, replace = [], os.fsync, os.replace

    def record_sync(descriptor):
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source, target):
        events.append(("replace", source))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    return events


@pytest.fixture
def helpers():  # the functions above, since a test module cannot import its conftest
    return SimpleNamespace(**{f.__name__: f for f in (same_bits, same_snapshot, make_snapshot, record_syncs)})


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "checkpoints" / "step-00000001"
    DirectoryCheckpointIO().save(str(path), make_snapshot())
    return path
