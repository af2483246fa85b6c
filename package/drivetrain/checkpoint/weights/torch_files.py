"""Take the weights of `torch.save` files: a state dict, or the checkpoint of another program that has one.

Nothing else in the file is used, except the constructor's arguments that are plain values.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.storage.filesystem import LOCAL, DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.weights.module_state import clean_names, is_extra
from drivetrain.core.errors import CheckpointError
from drivetrain.core.registry import Registry

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""The suffixes of `torch.save` files."""

LAYOUTS: Registry[Callable[[Mapping[Any, Any]], Mapping[str, Any] | None]] = Registry(
    "layout",
    {
        "lightning": "drivetrain.integrations.weight_files:of_lightning",
        "composer": "drivetrain.integrations.weight_files:of_composer",
    },
)
"""Functions that find the weights in other programs' files: they return fields of `TorchWeights`, or None."""

# PyTorch's tutorials, DeepSpeed without ZeRO, and the name in most scripts.
_KEYS = ("state_dict", "model_state_dict", "module", "model")


@dataclass(frozen=True)
class TorchWeights:
    """The weights in a `torch.save` file, and the names of its other content.

    Attributes:
        tensors: The tensors by name, without the prefixes of DDP and torch.compile.
        origin: The kind of file, for messages.
        path: The file.
        hparams: The constructor's arguments that are plain values.
        objects: The other arguments, each described in words.
        argument: The one constructor argument that holds all `hparams`; "" if each is an argument.
        left: The names of the file's other content.
        what: What the tensors are, for messages.
        warning: A warning that follows the file's name; "" for none.
    """

    tensors: dict[str, Tensor]
    origin: str
    path: str = ""
    hparams: dict[str, Any] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    argument: str = ""
    left: tuple[str, ...] = ()
    what: str = "the weights"
    warning: str = ""

    @property
    def note(self) -> str:
        """A line on what was read, and what was not."""
        left = f"; not read: {', '.join(map(str, self.left))}" if self.left else ""
        return f"{self.what} of {self.origin}{left}"


def read_torch_weights(path: str, files: FileSystem = LOCAL) -> TorchWeights:
    """Read the weights in a `torch.save` file by ``torch.load(weights_only=True)``.

    The tensors of a file on a disk are mapped, not read: copy those that outlive the file.

    Raises:
        DamagedCheckpointError: The file is not a complete `torch.save` file.
        CheckpointError: The file cannot be read, has no weights by name, or has objects of other classes than
            tensors and plain values.
    """
    found = _find_state(_content(path, files), path)
    state = {name: each for name, each in found.tensors.items() if not is_extra(name)}
    strange = [name for name, each in state.items() if not isinstance(each, Tensor)]
    if strange:
        raise CheckpointError(
            f"{path!r} has {_kind(state[strange[0]])} as {strange[0]!r} among its weights"
            f" ({len(strange)} entries are not tensors). Save the tensors alone:"
            " torch.save(module.state_dict(), path)"
        )
    names = clean_names(state, repr(path))
    if found.origin.startswith("a state dict") and all(
        name.startswith("module.") for name in names
    ):  # by DDP
        names = {name.removeprefix("module."): old for name, old in names.items()}
    return replace(found, tensors={name: state[old].detach() for name, old in names.items()}, path=path)


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


def _find_state(content: Any, path: str) -> TorchWeights:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path!r} holds {_kind(content)}, not weights by name")
    if _is_state(content):
        return TorchWeights(content, "a state dict")
    for name in LAYOUTS:
        found = LAYOUTS[name](content)
        if found is not None and _is_state(found["tensors"]):
            return TorchWeights(**found)
    for key in _KEYS:
        if _is_state(content.get(key)):
            left = tuple(name for name in content if name != key)
            return TorchWeights(content[key], f"a state dict under {key!r}", left=left)
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


def _kind(value: Any) -> str:
    """Describe a value in words."""
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
