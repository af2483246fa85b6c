"""Take the weights of `torch.save` files of other programs: Lightning's, Composer's, or a plain state dict.

Nothing else in the file is used, except Lightning's hyper-parameters that are plain values.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drivetrain.checkpoint.storage.filesystem import (
    LOCAL,
    DamagedCheckpointError,
    FileSystem,
    os_errors,
)
from drivetrain.checkpoint.weights.module_state import clean_names, is_extra
from drivetrain.core.errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""The suffixes of `torch.save` files."""

_VERSION = "pytorch-lightning_version"
_HPARAMS = "hyper_parameters"
_AVERAGED_FROM = "current_model_state"
"""The key of the model's own weights in Lightning's WeightAveraging; "state_dict" then has the averages."""

# Lightning, PyTorch's tutorials, DeepSpeed without ZeRO, and the name in most scripts.
_KEYS = ("state_dict", "model_state_dict", "module", "model")
_MOST_VALUES = 100_000
"""A hyper-parameter with more values is not plain: a small file can describe 2^60 by repeated references."""


@dataclass(frozen=True)
class TorchWeights:
    """The weights in a `torch.save` file, and the names of its other content.

    Attributes:
        tensors: The tensors by name, without the prefixes of DDP and torch.compile.
        origin: The kind of file, for messages.
        path: The file.
        hparams: Lightning's hyper-parameters that are plain values.
        objects: The other hyper-parameters, each described in words.
        argument: The one constructor argument that holds all `hparams`; "" if each is an argument.
        left: The names of the file's other content.
        averaged: Whether the weights are averages, and the file also has the model's own weights.
    """

    tensors: dict[str, Tensor]
    origin: str
    path: str = ""
    hparams: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    argument: str = ""
    left: tuple[str, ...] = ()
    averaged: bool = False

    @property
    def note(self) -> str:
        """A line on what was read, and what was not."""
        what = "the averages (state_dict)" if self.averaged else "the weights"
        left = f"; not read: {', '.join(self.left)}" if self.left else ""
        return f"{what} of {self.origin}{left}"


def read_torch_weights(path: str, files: FileSystem = LOCAL) -> TorchWeights:
    """Read the weights in a `torch.save` file by ``torch.load(weights_only=True)``.

    The tensors of a file on a disk are mapped, not read: copy those that outlive the file.

    Raises:
        DamagedCheckpointError: The file is not a complete `torch.save` file.
        CheckpointError: The file cannot be read, has no weights by name, or has objects of other classes than
            tensors and plain values.
    """
    content = _content(path, files)
    found = _find_state(content, path)
    state = {name: each for name, each in found.state.items() if not is_extra(name)}
    strange = [name for name, each in state.items() if not isinstance(each, Tensor)]
    if strange:
        raise CheckpointError(
            f"{path!r} has {_kind(state[strange[0]])} as {strange[0]!r} among its weights"
            f" ({len(strange)} entries are not tensors). Save the tensors alone:"
            " torch.save(module.state_dict(), path)"
        )
    names = clean_names(state, repr(path))
    if not found.is_checkpoint and all(name.startswith("module.") for name in names):  # by DDP
        names = {name.removeprefix("module."): old for name, old in names.items()}
    tensors = {name: state[old].detach() for name, old in names.items()}
    of_lightning, taken = _of_lightning(content, found.key), {found.key, _VERSION}
    if of_lightning:
        taken |= {_HPARAMS, "hparams_name"}
    left = tuple(str(name) for name in found.beside if name not in taken) if found.key else ()
    return TorchWeights(tensors, found.origin, path, left=left, **(of_lightning or _divided({})))


def _of_lightning(content: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """Return what Lightning's file says of the constructor and of averages; nothing for another's file."""
    hparams, argument = content.get(_HPARAMS, {}), content.get("hparams_name", "kwargs")
    if not isinstance(hparams, dict) or key != "state_dict":
        return {}
    argument = "" if argument == "kwargs" else str(argument)
    return {**_divided(hparams), "argument": argument, "averaged": _AVERAGED_FROM in content}


def _content(path: str, files: FileSystem) -> Any:
    try:
        with os_errors("read", path), files.open(path) as source, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a pickle protocol that the error names anyway
            with zipfile.ZipFile(source) as archive:
                changed = archive.testzip()  # torch compares no checksum of a mapped file
            if changed is not None:
                raise zipfile.BadZipFile(f"the checksum of {changed} differs")
            source.seek(0)
            given = {"f": path, "mmap": True} if files.renames else {"f": source}
            return torch.load(**given, weights_only=True, map_location="cpu")
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        old = " (torch before 1.6 wrote no zip files)" if "not a zip file" in str(error) else ""
        raise DamagedCheckpointError(
            f"{path!r} is not what torch.save writes, or not all of it: {error}{old}"
        ) from error
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = str(error).partition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise CheckpointError(
            f"torch.load(weights_only=True) refuses {path!r}:"
            f" {f'it has an object of {named[1]}' if named else reason}. Where you trust the file and have"
            " its code, save the weights alone: torch.save(torch.load(path,"
            " weights_only=False)['state_dict'],"
            " 'weights.pt')"
        ) from error


class _FoundWeights(NamedTuple):
    """The weights in a file, their key, and the mapping that has this key."""

    origin: str
    key: str
    state: dict[str, Any]
    beside: Mapping[Any, Any]

    @property
    def is_checkpoint(self) -> bool:
        return not self.origin.startswith("a state dict")


def _find_state(content: Any, path: str) -> _FoundWeights:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path!r} holds {_kind(content)}, not weights by name")
    if _is_state(content):
        return _FoundWeights("a state dict", "", content, {})
    inner = content.get("state")
    if isinstance(inner, dict) and _is_state(inner.get("model")):
        return _FoundWeights("a checkpoint of Composer", "model", inner["model"], inner)
    for key in _KEYS:
        if _is_state(content.get(key)):
            version = content.get(_VERSION)
            origin = f"a checkpoint of Lightning {version}" if version else f"a state dict under {key!r}"
            return _FoundWeights(origin, key, content[key], content)
    there = ", ".join(repr(str(key)) for key in list(content)[:10]) or "nothing"
    raise CheckpointError(
        f"{path!r} has no tensors by name, neither directly nor under {', '.join(map(repr, _KEYS))} or"
        f" 'state' -> 'model'. It has {there}"
    )


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(each, Tensor) for each in value.values())
    )


def _divided(hparams: Mapping[Any, Any]) -> dict[str, Any]:
    """Divide hyper-parameters into plain values and others."""
    named = {name: value for name, value in hparams.items() if isinstance(name, str)}
    plain = {name: value for name, value in named.items() if _is_plain(value)}
    objects = {name: _kind(value) for name, value in named.items() if name not in plain}
    return {"hparams": plain, "objects": objects}


def _is_plain(value: Any) -> bool:
    """Return whether a value consists only of numbers, texts, lists and mappings."""
    rest, seen = [value], 0
    while rest and seen < _MOST_VALUES:
        each = rest.pop()
        seen += 1
        if isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, (list, tuple)):
            rest += each
        elif each is not None and not isinstance(each, (bool, int, float, str)):
            return False
    return not rest


def _kind(value: Any) -> str:
    """Describe a value in words."""
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
