"""A task in a checkpoint: its constructor arguments and its weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.io import DirectoryCheckpointIO
from drivetrain.checkpoint.locate import resolve
from drivetrain.checkpoint.tree import pack, unpack
from drivetrain.errors import CheckpointError
from drivetrain.types import Json


@dataclass(frozen=True)
class StoredTask:
    """What `read_task` found.

    Attributes:
        path: The checkpoint that was read.
        hparams: Constructor arguments by name.
        unstored: The names of those that a file cannot hold.
        tensors: The weights.
    """

    path: str
    hparams: dict[str, Any]
    unstored: tuple[str, ...]
    tensors: dict[str, Tensor]


def pack_hparams(task: nn.Module) -> Json:
    """A task's constructor arguments as JSON; one that JSON cannot hold is named, not stored.

    A default that JSON cannot hold (a class, a function) is neither: the constructor will take it again.
    """
    constructor = inspect.signature(type(task).__init__).parameters
    values: dict[str, Json] = {}
    unstored: list[Json] = []
    for name, value in getattr(task, "hparams", {}).items():
        try:
            packed, tensors = pack(value)
            storable = not tensors
        except CheckpointError:
            packed, storable = None, False
        if storable:
            values[name] = packed
        elif name not in constructor or constructor[name].default is not value:
            unstored.append(name)
    return {"values": values, "unstored": unstored}


def read_task(path: str) -> StoredTask:
    """A checkpoint's constructor arguments and weights; `path` as in `resolve`.

    Raises:
        CheckpointError: Nothing readable there, or a checkpoint without them.
    """
    found = resolve(str(path))
    snapshot = DirectoryCheckpointIO().load(found, groups=("model",))
    stored = snapshot.objects.get("hparams")
    if not isinstance(stored, dict) or not isinstance(stored.get("values"), dict):
        raise CheckpointError(f"{found} holds no constructor arguments; it was not saved by a Trainer")
    values, unstored = stored["values"], stored.get("unstored")
    assert isinstance(values, dict)
    names = tuple(str(name) for name in unstored) if isinstance(unstored, list) else ()
    hparams = {name: unpack(value, {}) for name, value in values.items()}
    return StoredTask(found, hparams, names, snapshot.tensors["model"])


def read_extras(path: str) -> dict[str, Any]:
    """The extra states of a checkpoint's modules, by the names of a state dict.

    They stand in the run's state, of which a task that has none needs nothing.

    Args:
        path: A checkpoint that a Trainer saved.

    Raises:
        CheckpointError: They cannot be read.
    """
    snapshot = DirectoryCheckpointIO().load(path, groups=("state",))
    state = snapshot.objects.get("state")
    packed = state.get("module_extras") if isinstance(state, dict) else None
    extras = unpack(packed or {}, snapshot.tensors["state"])
    if not isinstance(extras, dict):
        raise CheckpointError(f"{path}: the extra states of its modules are no mapping")
    return extras
