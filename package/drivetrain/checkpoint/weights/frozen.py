"""Frozen parameters, which a checkpoint may leave out: their fingerprint is stored in their place.

The program rebuilds them, and the fingerprint tells whether it has rebuilt the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.checkpoint.format.strict_json import as_object
from drivetrain.checkpoint.format.tensors import bytes_of, check_tensor, has_plain_bytes
from drivetrain.checkpoint.saving.reading import Reader
from drivetrain.checkpoint.weights.module_state import SHOWN, clean_name, module_state
from drivetrain.core.errors import CheckpointError, ConfigError, nearest
from drivetrain.core.types import Json

FROZEN = "frozen"
"""The object of a checkpoint that has only trained parameters: the fingerprint of each other one, by name."""

Fingerprints = Mapping[str, Json]
"""The dtype, shape and hash of each frozen parameter by name."""


def fingerprints(module: nn.Module, names: Collection[str] | None = None) -> dict[str, Json]:
    """Return the fingerprints of a module's parameters and buffers, whose values are read once.

    Args:
        module: The module, not yet sharded.
        names: The clean names; None means all frozen parameters. Names that are not there are left out.

    Returns:
        For each, under every name of a tied one: "dtype", "shape" and "xxh3_128", the hash of its bytes. The
        hash is None where there are no plain bytes: on the meta device, or in a tensor of another class.
    """
    known: dict[int, Json] = {}
    found: dict[str, Json] = {}
    for raw, tensor in _named(module):
        name, is_parameter = clean_name(raw), isinstance(tensor, nn.Parameter)
        if (is_parameter and not tensor.requires_grad) if names is None else name in names:
            if id(tensor) not in known:
                known[id(tensor)] = _fingerprint(tensor)
            found[name] = known[id(tensor)]
    return found


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def check_left_out(module: nn.Module, names: Collection[str]) -> None:
    """Check that the names of what checkpoints leave out are those of frozen parameters or buffers.

    Raises:
        ConfigError: A name is not; tells the closest one.
    """
    known = {clean_name(raw): tensor for raw, tensor in _named(module)}
    if isinstance(names, str):
        raise ConfigError(f"ModelInfo(left_out={names!r}) must be a list of names")
    for name in sorted(names):
        if name not in known:
            raise ConfigError(
                f"ModelInfo(left_out=...) has {name!r}, which is no parameter or buffer of the task."
                f" {nearest(name, known)}"
            )
        if known[name].requires_grad:
            raise ConfigError(
                f"ModelInfo(left_out=...) has {name!r}, which is trained, so a checkpoint without it could"
                " not be resumed. Freeze it by requires_grad_(False), or do not leave it out"
            )


def frozen_of(reader: Reader) -> Json:
    """Return the object `FROZEN` of a checkpoint; None if it has all parameters."""
    return reader.object(FROZEN) if FROZEN in reader.manifest.objects() else None


def _fingerprint(parameter: Tensor) -> Json:
    values: Any = parameter.data
    has_bytes = type(values) is Tensor and not values.is_meta and values.layout == torch.strided
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "shape": list(parameter.shape),
        "xxh3_128": xxhash.xxh3_128_hexdigest(bytes_of(values.cpu().contiguous())) if has_bytes else None,
    }


def check_storable(module: nn.Module) -> None:
    """Check that a file can hold each parameter and persistent buffer.

    Raises:
        ConfigError: A parameter is a tensor without plain bytes, such as a quantised one, or a tensor has a
            dtype or layout that no file can hold; names it.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter) or has_plain_bytes(parameter):
            continue
        kind = f"{type(parameter.data).__module__}.{type(parameter.data).__qualname__}"
        raise ConfigError(
            f"checkpoints cannot hold {clean_name(name)!r}, a {kind}, which has no plain bytes. If it is"
            " frozen, leave it out: CheckpointConfig(parameters='trainable'). Or save nothing:"
            " checkpoint=False"
        )
    for name, tensor in module_state(module)[0].items():
        if is_lazy(tensor) or tensor.is_meta or not has_plain_bytes(tensor):
            continue
        try:
            check_tensor(tensor, f"checkpoints cannot hold {name!r}")
        except CheckpointError as error:
            raise ConfigError(
                f"{error}. Keep it in another dtype (torch.view_as_real makes a complex128 a float64),"
                " register a buffer with persistent=False, or save nothing: checkpoint=False"
            ) from None


def has_unknown(found: Fingerprints) -> bool:
    """Return whether a parameter has no hash, so that only its dtype and shape are compared."""
    return any(as_object(each, name)["xxh3_128"] is None for name, each in found.items())


def check_same(stored: Json, mine: Fingerprints, where: str, *, may_convert: bool = False) -> None:
    """Check that the frozen parameters are those of a checkpoint's run.

    Args:
        stored: The object `FROZEN` of the checkpoint.
        mine: The fingerprints of the program's parameters.
        where: The checkpoint, for the message.
        may_convert: Whether they may have another dtype, so that only their shapes are compared.

    Raises:
        CheckpointError: They differ; names the parameters.
    """
    theirs = as_object(stored, f"{where}: {FROZEN}")
    problems = [f"{name!r} is not frozen here, or not there" for name in sorted(theirs.keys() - mine.keys())]
    problems += [f"{name!r} is frozen here alone" for name in sorted(mine.keys() - theirs.keys())]
    for name in sorted(theirs.keys() & mine.keys()):
        there, here = as_object(theirs[name], f"{where}: {name!r}"), as_object(mine[name], name)
        is_converted = may_convert and there.get("dtype") != here["dtype"]
        for what in ("shape",) if may_convert else ("dtype", "shape"):
            if there.get(what) != here[what]:
                problems.append(f"{name!r} has the {what} {there.get(what)} there, {here[what]} here")
                break
        else:
            hashes = there.get("xxh3_128"), here["xxh3_128"]
            if not is_converted and None not in hashes and hashes[0] != hashes[1]:
                problems.append(f"{name!r} has other values (hash {hashes[0]} there, {hashes[1]} here)")
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(
            f"{where} holds the trained parameters only, and this task's frozen ones differ from its run's:"
            f" {'; '.join(problems[:SHOWN])}{more}. Make the task with the same frozen parameters, such as"
            " from the same pretrained model"
        )


class FrozenParameters:
    """The frozen parameters of a fit whose checkpoints leave them out.

    Args:
        found: Their fingerprints, from before the strategy has placed them: these do not depend on strategy,
            precision or number of processes.

    Attributes:
        found: As given.
    """

    def __init__(self, found: Fingerprints) -> None:
        self.found = found
        self._versions: dict[str, tuple[Tensor, int]] = {}

    def without(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that a checkpoint stores."""
        return {name: each for name, each in weights.items() if name not in self.found}

    def watch(self, module: nn.Module) -> None:
        """Remember the state of the parameters, for `check_unchanged`."""
        self._versions = {name: (each, _version(each)) for name, each in self._in(module)}

    def check_unchanged(self, module: nn.Module) -> None:
        """Check that training has changed none since `watch`.

        That is for parameters torch's count of changes in place, and for buffers their hash: batch norm
        changes running means without counting.

        Raises:
            CheckpointError: A checkpoint would lose the change; names the parameter or buffer.
        """
        for name, tensor in self._in(module):
            before = self._versions.get(name)
            if not isinstance(tensor, nn.Parameter):
                if _fingerprint(tensor) != self.found[name]:
                    raise CheckpointError(
                        f"ModelInfo(left_out=...) names the buffer {name!r}, but training has changed it. Do"
                        " not leave it out"
                    )
            elif before is not None and before[0] is tensor and before[1] != _version(tensor):
                raise CheckpointError(
                    f"{name!r} is frozen, but was changed in training, and CheckpointConfig(parameters="
                    "'trainable') would not store that. Use parameters='all', or make it a buffer"
                )

    def _in(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        named = ((clean_name(raw), each) for raw, each in _named(module))
        return [(name, each) for name, each in named if name in self.found]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
