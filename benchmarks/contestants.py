"""The ways to save and load that `checkpoint.py` compares: the same tensors, and durable when they return."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.format.tensors import bytes_of

Groups: TypeAlias = dict[str, dict[str, Tensor]]
"""Group ("model", "optimizer") to name to tensor."""

PLAIN = "plain"
OURS = "drivetrain"

CHUNK = 1 << 20
"""Bytes of a plain write, or read: larger ones took half as long again to write."""

_LAYERS = 12
_ROWS = 17_408
"""Rows of the embeddings: 16,384 tokens and 1,024 positions."""


def gpt_like(gigabytes: float) -> Groups:
    """The weights of a GPT of 12 layers and AdamW's state of them: 592 tensors of one number to many.

    Args:
        gigabytes: About how much in all, in 1e9 bytes; it decides the width.
    """
    wanted = gigabytes * 1e9 / 12  # float32, and two moments for each weight
    width = 8
    while _weights_at(width + 8) <= wanted:
        width += 8
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=generator) for name, shape in _shapes(width).items()}
    optimizer: dict[str, Tensor] = {}
    for name, weight in model.items():
        optimizer[f"{name}/step"] = torch.tensor(1000.0)
        optimizer[f"{name}/exp_avg"] = weight * 1e-3
        optimizer[f"{name}/exp_avg_sq"] = weight.square() * 1e-6
    return {"model": model, "optimizer": optimizer}


def _weights_at(width: int) -> int:
    return _LAYERS * (12 * width + 13) * width + (_ROWS + 2) * width


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "tokens.weight": (16_384, width),
        "positions.weight": (1_024, width),
    }
    for layer in range(_LAYERS):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes[f"blocks.{layer}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{layer}.{name}.bias"] = (rows,)
        for name in ("norm_1", "norm_2"):
            shapes[f"blocks.{layer}.{name}.weight"] = shapes[f"blocks.{layer}.{name}.bias"] = (width,)
    return {**shapes, "norm.weight": (width,), "norm.bias": (width,)}


def shapes_of(groups: Groups) -> Groups:
    """The same tensors without data."""
    return {g: {name: each.to("meta") for name, each in named.items()} for g, named in groups.items()}


def size_of(groups: Groups) -> int:
    """The bytes of all tensors."""
    return sum(tensor.nbytes for named in groups.values() for tensor in named.values())


@dataclass(frozen=True)
class Contestant:
    """A way to save and load.

    Attributes:
        name: What it is called in the tables.
        save: Writes the tensors to a path that does not exist yet; durable on return.
        load: Reads them into fresh memory. The tensors given are for their names and shapes only.
    """

    name: str
    save: Callable[[Path, Groups], None]
    load: Callable[[Path, Groups], object]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(directory: Path) -> None:
    """A file that was synced is durable only when its name is, and the directory's."""
    for file in directory.iterdir():
        _sync(file)
    _sync(directory)
    _sync(directory.parent)


def _plain_save(path: Path, groups: Groups) -> None:
    path.mkdir()
    for group, tensors in groups.items():
        with open(path / group, "xb", buffering=0) as file:
            for tensor in tensors.values():
                rest = bytes_of(tensor)
                while rest:
                    rest = rest[file.write(rest[:CHUNK]) :]
            os.fsync(file.fileno())
    _sync(path)
    _sync(path.parent)


def _plain_load(path: Path, groups: Groups) -> Groups:
    found: Groups = {}
    for group, tensors in groups.items():
        found[group] = {name: torch.empty(tensor.shape) for name, tensor in tensors.items()}
        with open(path / group, "rb", buffering=0) as file:
            for tensor in found[group].values():
                rest = bytes_of(tensor)
                while rest:
                    rest = rest[file.readinto(rest[:CHUNK]) :]
    return found


def _torch_save(path: Path, groups: Groups) -> None:
    path.mkdir()
    torch.save(groups, path / "all.pt")
    _sync_all(path)


def _torch_load(path: Path, groups: Groups) -> object:
    return torch.load(path / "all.pt", weights_only=True, mmap=False)


def _safetensors_save(path: Path, groups: Groups) -> None:
    path.mkdir()
    for group, tensors in groups.items():
        safetensors.torch.save_file(tensors, path / group)
    _sync_all(path)


def _safetensors_load(path: Path, groups: Groups) -> object:
    # What it returns are views of the mapped file, of which nothing has been read yet; the copies are.
    return {
        group: {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path / group).items()}
        for group in groups
    }


def _dcp_save(path: Path, groups: Groups) -> None:
    dcp.save(dict(groups), storage_writer=dcp.FileSystemWriter(path, sync_files=True), no_dist=True)
    _sync(path)
    _sync(path.parent)


def _dcp_load(path: Path, groups: Groups) -> Groups:
    found = {
        g: {name: torch.empty(each.shape) for name, each in named.items()} for g, named in groups.items()
    }
    dcp.load(dict(found), storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return found


def _our_save(path: Path, groups: Groups) -> None:
    DirectoryCheckpointIO().save(str(path), Snapshot(dict(groups)))


def _our_load(path: Path, groups: Groups) -> object:
    return DirectoryCheckpointIO().load(str(path))


CONTESTANTS = [
    Contestant(PLAIN, _plain_save, _plain_load),
    Contestant("torch.save", _torch_save, _torch_load),
    Contestant("safetensors", _safetensors_save, _safetensors_load),
    Contestant("torch.distributed.checkpoint", _dcp_save, _dcp_load),
    Contestant(OURS, _our_save, _our_load),
]
