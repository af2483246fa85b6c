"""Weights as a plain safetensors file, for use without this package."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from drivetrain.checkpoint.files import HashedReader, write_atomically
from drivetrain.checkpoint.tensors import read_tensors, tensor_chunks


def export_weights(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Write a safetensors file that `safetensors.torch.load_file` and ``load_state_dict(strict=True)`` take.

    Tied tensors are written under each of their names. A file that is there is replaced in one step.

    Args:
        tensors: By name, as in a state dict; any device and strides.
        path: The file.

    Raises:
        CheckpointError: A tensor that the format cannot hold, or a file that cannot be written.
    """
    target = os.fspath(path)
    write_atomically(target, tensor_chunks(tensors, f"the weights for {target!r}"))


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a safetensors file, on the CPU; a symbolic link is followed: model hubs' caches are full of them.

    Raises:
        DamagedCheckpointError: No such file, or no well-formed safetensors file. A plain file has no hash, so
            changed bytes inside a tensor go unseen.
        CheckpointError: It may not be read.
    """
    with HashedReader(os.path.realpath(path)) as reader:
        return read_tensors(reader)
