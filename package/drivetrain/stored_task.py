"""A task in a checkpoint: its constructor's arguments, stored and read again, and its weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.io import DirectoryCheckpointIO
from drivetrain.checkpoint.locate import load_newest
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.records import TENSORS
from drivetrain.checkpoint.tree import unpack
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.stored_dataclass import dataclass_of, make, pack_values
from drivetrain.task_arguments import parameters_of
from drivetrain.types import Json


@dataclass(frozen=True)
class StoredTask:
    """What `read_task` found.

    Attributes:
        path: The checkpoint that was read.
        hparams: Constructor arguments by name.
        dataclasses: Those that are dataclasses: what `arguments` makes them of.
        unstored: The names of those that a file cannot hold.
        tensors: The weights.
    """

    path: str
    hparams: dict[str, Any]
    unstored: tuple[str, ...]
    tensors: dict[str, Tensor]
    dataclasses: dict[str, Json] = field(default_factory=dict)

    def arguments(self, cls: type[nn.Module], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments to make the task with: the stored ones, and others in their place.

        Raises:
            ConfigError: One could not be stored, or is a dataclass that the constructor does not name, and is
                not given.
        """
        arguments = dict(self.hparams)
        lacking = set(self.unstored) - set(overrides)
        annotations = _annotations(cls)
        for name, stored in self.dataclasses.items():
            if name in overrides:
                continue
            kind = dataclass_of(stored, annotations.get(name), _namespace(cls))
            if kind is None:
                lacking.add(name)
            else:
                arguments[name] = make(kind, stored, f"the argument {name!r} of {self.path}")
        if lacking:
            first, *_ = names = sorted(lacking)
            raise ConfigError(
                f"{cls.__name__} was made with arguments that a file cannot hold ({', '.join(names)}); pass"
                f" them: {cls.__name__}.from_checkpoint(path, {first}=...)"
            )
        return {**arguments, **overrides}


def pack_hparams(task: nn.Module) -> Json:
    """A task's constructor arguments as JSON; one that JSON cannot hold is named, not stored.

    A default that JSON cannot hold (a class, a function) is neither: the constructor will take it again.

    Returns:
        "values" by name, "dataclasses" by name where there are any, and "unstored", a list of names.
    """
    cls = type(task)
    defaults = {each.name: each.default for each in parameters_of(cls)}
    packed, refused = pack_values(getattr(task, "hparams", {}), _annotations(cls), _namespace(cls))
    return {
        **packed,
        "unstored": [
            name for name, value in refused.items() if name not in defaults or defaults[name] is not value
        ],
    }


def _annotations(cls: type[nn.Module]) -> dict[str, Any]:
    return {each.name: each.annotation for each in parameters_of(cls)}


def _namespace(cls: type[nn.Module]) -> dict[str, Any]:
    """Where the names in a constructor's annotations are looked up."""
    return getattr(inspect.unwrap(cls.__init__), "__globals__", {})


def read_task(path: str) -> StoredTask:
    """A checkpoint's constructor arguments and weights; `path` as in `resolve`.

    Raises:
        CheckpointError: Nothing readable there, or a checkpoint without them.
    """
    files = file_system(path)
    if path.endswith(TENSORS) and not DirectoryCheckpointIO().exists(files.split(path)[0]):
        raise CheckpointError(
            f"{path!r} is a file of weights, without the constructor's arguments. Make the task, and call its"
            " load_weights(path)"
        )
    found, snapshot = load_newest(path, ("model",))
    stored = snapshot.objects.get("hparams")
    if not isinstance(stored, dict) or not isinstance(stored.get("values"), dict):
        raise CheckpointError(
            f"{found} holds no constructor arguments; it was not saved by a Trainer. Make the task, and call"
            " its load_weights(path)"
        )
    values, unstored, made = stored["values"], stored.get("unstored"), stored.get("dataclasses")
    assert isinstance(values, dict)
    return StoredTask(
        path=found,
        hparams={name: unpack(value, {}) for name, value in values.items()},
        unstored=tuple(str(name) for name in unstored) if isinstance(unstored, list) else (),
        tensors=snapshot.tensors["model"],
        dataclasses=made if isinstance(made, dict) else {},
    )


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
