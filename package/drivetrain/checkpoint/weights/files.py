"""The files of exported weights: their names, their content, and their index.

The weights are one file, `model.safetensors`. Above a size they are several,
`model-00001-of-00002.safetensors` and so on, and `model.safetensors.index.json` names the file of each
tensor. Hugging Face's libraries write and read the same files
(https://huggingface.co/docs/huggingface_hub/package_reference/serialization).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from drivetrain.checkpoint.format.records import TENSORS
from drivetrain.checkpoint.format.strict_json import parse_json
from drivetrain.checkpoint.format.tensors import WRITER
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.types import Json

INDEX = ".index.json"
"""The suffix of an index, after the name of the single file that it replaces."""

MODEL = f"model{TENSORS}"
"""The name that other programs look for in a directory."""

TORCH = ".bin"
"""The suffix of `torch.save` files in Hugging Face's older folders."""

_PLAIN_NAME = re.compile(r"(?!\.)[^/\\:\0\ud800-\udfff]+")


@dataclass(frozen=True)
class WeightFiles:
    """The possible file names of weights exported to one path.

    Attributes:
        single: The name of the file if it is the only one.
    """

    single: str

    @property
    def index(self) -> str:
        """The name of the index of several files."""
        return f"{self.single}{INDEX}"

    @property
    def stem(self) -> str:
        """The common prefix of several files."""
        return self.single.removesuffix(TENSORS)

    def several(self, count: int) -> list[str]:
        """Return the names of `count` files."""
        return [f"{self.stem}-{number:05d}-of-{count:05d}{TENSORS}" for number in range(1, count + 1)]

    def is_one_of_several(self, name: str) -> bool:
        """Return whether a name is that of one of several files, of any number."""
        pattern = rf"{re.escape(self.stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(TENSORS)}"
        return re.fullmatch(pattern, name) is not None


def divide(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Divide tensors into files of at most `limit` bytes of tensors.

    The order is that of the mapping, as in Hugging Face's libraries. A tensor above the limit gets its own
    file.

    Returns:
        The names for each file; a single empty list if there are no tensors.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > limit:
            files.append([name])
            continue
        if filled + size > limit:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*files, current] if current or not files else files


def dump_index(total_size: int, weight_map: Mapping[str, str]) -> bytes:
    """Return the content of an index.

    Args:
        total_size: The bytes of all tensors.
        weight_map: Name to file.
    """
    index = {"metadata": {"total_size": total_size, **WRITER}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode("ascii")


def parse_index(data: bytes | bytearray, what: str) -> dict[str, list[str]]:
    """Parse an index; return the names of the tensors by file.

    Raises:
        DamagedCheckpointError: The data is not an index, or names a file in another directory or of another
            kind.
    """
    index = parse_json(data, what)
    weight_map: Json = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpointError(f"{what} has no weight_map, which names the file of each tensor")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise DamagedCheckpointError(
                f"{what} places {name!r} in {str(file)[:80]!r}; allowed are plain names of files in the same "
                "directory"
            )
        if not file.endswith((TENSORS, TORCH)):
            raise DamagedCheckpointError(
                f"{what} places {name!r} in {file!r}, which is no {TENSORS} or {TORCH} file"
            )
        files.setdefault(file, []).append(name)
    return files
