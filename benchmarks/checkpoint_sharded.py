"""Saving and loading of a sharded model and its optimizer's state by two processes, for `checkpoint.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.distributed.ranks import Ranks

RANKS = 2
_LAYERS = 24


def sharded_state(gigabytes: float) -> dict[str, dict[str, Tensor]]:
    """The weights of linear layers and AdamW's moments of them, each cut in two by `fully_shard`.

    Args:
        gigabytes: About how much in all, in 1e9 bytes, on both processes together.
    """
    width = max(8, int((gigabytes * 1e9 / 12 / _LAYERS) ** 0.5) // 8 * 8)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    moments = {}
    for name, weight in weights.items():
        moments[f"{name}/exp_avg"] = weight * 1e-3
        moments[f"{name}/exp_avg_sq"] = weight * weight
    return {"model": weights, "optimizer": moments}


def empty_like(groups: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Tensors to load into, in fresh memory."""
    return {g: {n: torch.empty_like(each) for n, each in named.items()} for g, named in groups.items()}


def measure(directory: str, gigabytes: float, rounds: int) -> dict[str, list[float]]:
    """Run on every process: seconds of each round, by what was done; in turns."""
    groups: Any = sharded_state(gigabytes)
    io = DirectoryCheckpointIO(ranks=Ranks.of_job())
    path = Path(directory, "sharded")
    actions: dict[str, Callable[[], object]] = {
        "torch.distributed.checkpoint, save": lambda: dcp.save(
            dict(groups), storage_writer=dcp.FileSystemWriter(path, sync_files=True)
        ),
        "torch.distributed.checkpoint, load": lambda: dcp.load(
            empty_like(groups), storage_reader=dcp.FileSystemReader(path)
        ),
        "drivetrain, save": lambda: io.save(str(path), Snapshot(dict(groups))),
        "drivetrain, load": lambda: io.load(str(path), like=lambda group, name, shape: groups[group][name]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for round_ in range(rounds):
        order = ["torch.distributed.checkpoint", "drivetrain"]
        for name in order if round_ % 2 == 0 else order[::-1]:
            for verb in ("save", "load"):
                os.sync()
                dist.barrier()
                start = perf_counter()
                actions[f"{name}, {verb}"]()
                dist.barrier()
                seconds[f"{name}, {verb}"].append(perf_counter() - start)
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            dist.barrier()
    return seconds
