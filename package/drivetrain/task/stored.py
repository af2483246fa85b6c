"""A task in a checkpoint: its constructor's arguments and its weights."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.format.tree import pack, unpack
from drivetrain.checkpoint.formats import FORMAT, NAMES, ORIGIN
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.saving.run_directory import load_newest
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.frozen import FROZEN, check_same, fingerprints
from drivetrain.checkpoint.weights.load import describe_weights, is_torch_file, is_weight_file
from drivetrain.checkpoint.weights.module_state import full_state
from drivetrain.core.errors import CheckpointError, ConfigError, without_secrets
from drivetrain.core.types import Json
from drivetrain.task.hparams import parameters_of
from drivetrain.task.model_info import info_of


@dataclasses.dataclass(frozen=True)
class StoredTask:
    """The result of `read_task`.

    Attributes:
        path: The checkpoint that was read.
        hparams: Constructor arguments by name.
        dataclasses: The arguments that are dataclasses, in their stored form.
        unstored: Names of the arguments that a file cannot hold.
        tensors: The weights.
    """

    path: str
    hparams: dict[str, Any]
    unstored: tuple[str, ...]
    tensors: dict[str, Tensor]
    dataclasses: dict[str, Json] = dataclasses.field(default_factory=dict)

    def arguments(self, cls: type[nn.Module], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the constructor arguments: the stored ones, updated with `overrides`."""
        arguments = dict(self.hparams)
        lacking = set(self.unstored) - set(overrides)
        kinds = _dataclasses_of(cls)  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
        for name, stored in self.dataclasses.items():
            if name not in overrides:
                made = _make(kinds.get(name, ()), stored, f"the argument {name!r} of {self.path}")
                if made is None:
                    lacking.add(name)
                arguments[name] = made
        parameters = {each.name: each.kind for each in parameters_of(cls)}
        strange = sorted(lacking.difference(parameters))
        if strange and inspect.Parameter.VAR_KEYWORD not in parameters.values():
            raise ConfigError(
                f"{self.path} is a checkpoint of another task: its constructor has the arguments"
                f" {', '.join(map(repr, strange))}, which {cls.__name__} does not take. Call"
                " from_checkpoint of the class that was trained"
            )
        if lacking:
            first, *_ = names = sorted(lacking)
            raise ConfigError(
                f"{cls.__name__} was made with arguments that a file cannot hold ({', '.join(names)}); pass"
                f" them: {cls.__name__}.from_checkpoint(path, {first}=...)"
            )
        return {**arguments, **overrides}


def pack_hparams(task: nn.Module) -> Json:
    """Return a task's constructor arguments as JSON, with the names of those that JSON cannot hold.

    An argument with a secret, such as an address with a password, is not stored either.

    A dataclass is stored by its fields if they are plain values and the constructor's annotation names it.
    A default that JSON cannot hold (a class, a function) is neither stored nor named: the constructor applies
    it again.

    Returns:
        "values" by name, "dataclasses" by name if there are any, "unstored", a list of names, and the task's
        "format" and "origin", if it has them.
    """
    cls = type(task)
    defaults = {each.name: each.default for each in parameters_of(cls)}
    kinds = _dataclasses_of(cls)  # type: ignore[arg-type]  # mypy takes no class of modules for hashable
    values: dict[str, Json] = {}
    made: dict[str, Json] = {}
    unstored: list[Json] = []
    for name, value in getattr(task, "hparams", {}).items():
        try:
            if type(value) in kinds.get(name, ()):
                fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
                made[name] = {"class": type(value).__name__, "values": _packed(fields)}
            else:
                values[name] = _packed(value)
        except CheckpointError:
            if name not in defaults or defaults[name] is not value:
                unstored.append(name)
    info = info_of(task)
    return {
        "values": values,
        **({"dataclasses": made} if made else {}),
        "unstored": unstored,
        **({FORMAT: info.export_format} if info.export_format else {}),
        **({NAMES: dict(info.export_names)} if info.export_names else {}),
        **({ORIGIN: dict(info.origin)} if info.origin else {}),
    }


def _packed(value: Any) -> Json:
    packed, tensors = pack(value)
    if tensors:
        raise CheckpointError("JSON cannot hold tensors")
    if without_secrets(str(packed)) != str(packed):
        raise CheckpointError("a checkpoint holds no secret")
    return packed


@cache  # it takes half a millisecond, and every save asks
def _dataclasses_of(cls: type[nn.Module]) -> dict[str, list[type]]:
    """Return the dataclasses that a constructor's annotations name, alone or in a union, by argument.

    A checkpoint holds only the name of the class, for comparison. Nothing is imported by a name from a file.
    """
    try:
        hints = typing.get_type_hints(inspect.unwrap(cls.__init__))
    except Exception:  # an annotation may be any expression, for readers or type checkers only
        return {}
    found = {}
    for name, hint in hints.items():
        kinds = [each for each in (hint, *typing.get_args(hint)) if isinstance(each, type)]
        found[name] = [each for each in kinds if dataclasses.is_dataclass(each) and _is_made_of_fields(each)]
    return found


def _is_made_of_fields(kind: type) -> bool:
    return set(inspect.signature(kind).parameters) == {each.name for each in dataclasses.fields(kind)}


def _make(kinds: Iterable[type], stored: Json, what: str) -> Any:
    """Return the stored dataclass; None if the constructor names no dataclass of that name."""
    values = stored.get("values") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(values, dict):
        raise CheckpointError(f"{what} is not a stored dataclass")
    kind = next((each for each in kinds if each.__name__ == stored.get("class")), None)
    if kind is None:
        return None
    fields = {name: unpack(value, {}) for name, value in values.items()}
    for each in inspect.signature(kind).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            fields.update(fields.pop(each.name, {}))
    try:
        inspect.signature(kind).bind(**fields)
    except TypeError as error:
        raise ConfigError(
            f"{what} does not fit {kind.__name__}: {error}. It was stored by another version of that class;"
            " pass the argument"
        ) from None
    return kind(**fields)


def read_task(path: str) -> StoredTask:
    """Return the constructor arguments and weights of a checkpoint, given as to `resolve`."""
    files = file_system(path)
    if is_weight_file(path) and not DirectoryCheckpointIO().exists(files.split(path)[0]):
        raise CheckpointError(
            f"{path!r} is a file of weights, without the constructor's arguments. Make the task, and call its"
            " load_weights(path); or make a checkpoint of Lightning's file by `drivetrain checkpoint import`"
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


def read_frozen(path: str, task: nn.Module) -> Collection[str]:
    """Return the names of the frozen parameters that a checkpoint leaves out, once the task has the same.

    Args:
        path: A checkpoint, or a file of weights.
        task: The task that is to get the checkpoint's weights.
    """
    if is_torch_file(path):
        return ()
    if is_weight_file(path):
        stored = describe_weights(path).frozen
    else:
        stored = DirectoryCheckpointIO().load(path, groups=()).objects.get(FROZEN)
    if not isinstance(stored, dict):
        return ()
    check_same(stored, fingerprints(task, stored.keys()), path)
    return stored.keys()


def read_extras(path: str, module: nn.Module, tensors: Collection[str]) -> dict[str, Any]:
    """Return the extra states of a checkpoint's modules, by the names of a state dict, and its empty buffers.

    They are part of the run's state. A module whose state the tensors make whole does not need that file.

    Args:
        path: A checkpoint that a Trainer saved, or a file of weights. A file of weights gives an empty
            mapping.
        tensors: The names of the checkpoint's tensors.
    """
    if is_weight_file(path) or full_state(module).keys() <= set(tensors):
        return {}
    snapshot = DirectoryCheckpointIO().load(path, groups=("state",))
    state = snapshot.objects.get("state")
    packed = state.get("module_extras") if isinstance(state, dict) else None
    extras = unpack(packed or {}, snapshot.tensors["state"])
    if not isinstance(extras, dict):
        raise CheckpointError(f"{path}: the extra states of its modules are not a mapping")
    return extras
