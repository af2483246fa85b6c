"""Export weights as a `torch.save` file, for programs that need one. Written on request, never read."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.checkpoint.storage.files import delete_if_there, finished, replacing, write_chunk
from drivetrain.checkpoint.storage.filesystem import SAVING, FileSystem, Sink, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import floating_dtype
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors
from drivetrain.core.errors import DrivetrainError


def export_torch(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    write: bool = True,
    files: FileSystem | None = None,
) -> str:
    """Write a state dict that `torch.load(path, weights_only=True)` reads, in one step.

    The file contains a pickle, as all torch files do: prefer the safetensors of `export_weights` for programs
    that can read them. Tied tensors stay tied, unless they are sharded. All tensors are in the CPU's memory
    at
    once.

    Args:
        tensors: The tensors by name, as for `export_weights`.
        path: The file, such as "model.pt"; also an address.
        dtype: The dtype for floating-point tensors; None keeps each.
        write: Whether this process writes. One of several processes does, and only that one raises on
            failure.
        files: The file system; None chooses it by the path.

    Returns:
        The path.

    Raises:
        CheckpointError: A tensor cannot be stored, or the file cannot be written.
        ConfigError: The dtype is unknown.
    """
    target = os.fspath(path)
    lazy = LazyTensors(tensors, floating_dtype(dtype), f"the weights for {target!r}")
    if not write:
        lazy.gather_rest(tensors)
        return target
    try:
        state = _state(tensors, lazy)
    except DrivetrainError:
        lazy.gather_rest(tensors)  # the other processes wait for this one in the next gather
        raise
    with os_errors("write", target):
        _write(state, target, file_system(target) if files is None else files)
    return target


def _state(tensors: Mapping[str, Tensor], lazy: LazyTensors) -> dict[str, Tensor]:
    """Return plain tensors on the CPU; tied tensors stay tied."""
    state: dict[str, Tensor] = {}
    made: dict[object, Tensor] = {}
    for name, tensor in tensors.items():
        # Not for shards: all processes must agree on which are tied, and some may have no part of them.
        key = name if is_sharded(tensor) else _memory(tensor)
        if key not in made:
            value = lazy.materialize(name).to("cpu").resolve_conj().resolve_neg().contiguous()
            # torch.save would write the whole storage of a view.
            is_part = value.untyped_storage().nbytes() > value.numel() * value.element_size()
            made[key] = value.clone() if is_part else value
        state[name] = made[key]
    return state


def _memory(tensor: Tensor) -> object:
    """Return a key that is equal for tied tensors, such as the two names of a tied parameter."""
    address = tensor.data_ptr() or id(tensor)  # XLA's tensors have no address, so none counts as tied
    return tensor.device, address, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj()


def _write(state: dict[str, Tensor], target: str, files: FileSystem) -> None:
    path = files.absolute(target)
    parent, name = files.split(path)
    hidden = f"{SAVING}{name}"
    files.make_directory(parent)
    if files.renames:
        delete_if_there(files.join(parent, hidden), files)  # the remains of a killed export to this path
    with replacing(path, hidden, files) as place, finished(files.create(place)) as sink:
        stream = _Stream(sink)
        try:
            torch.save(state, stream)  # type: ignore[arg-type]  # it needs nothing but `write` and `flush`
        except Exception:
            if stream.error is not None:
                raise stream.error from None  # torch's error says only that it could not write
            raise


class _Stream:
    """The stream that torch.save writes to.

    Args:
        sink: The new file.

    Attributes:
        error: The error of a failed write, or None.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""
        try:
            write_chunk(self._sink, memoryview(data).cast("B"))
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
