"""Weights as a file of `torch.save`, for programs that take nothing else. Written on request, never read."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain.checkpoint.dtypes import floating_dtype
from drivetrain.checkpoint.files import SAVING, delete_if_there, finished, replacing, write_chunk
from drivetrain.checkpoint.filesystem import FileSystem, Sink, os_errors
from drivetrain.checkpoint.outgoing import Outgoing
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.sharding import is_sharded
from drivetrain.errors import DrivetrainError


def export_torch(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    write: bool = True,
    files: FileSystem | None = None,
) -> str:
    """Write a state dict that `torch.load(path, weights_only=True)` reads, in one step.

    The file contains a pickle, as all of torch's do: safetensors, which `export_weights` writes, is the
    better choice for everything that can read it. Tied tensors stay tied, unless they are sharded. All of
    them are in the CPU's memory at once.

    Args:
        tensors: By name, as for `export_weights`.
        path: The file, such as "model.pt"; also an address.
        dtype: What to convert floating-point tensors to; None for what each has.
        write: Whether this process writes; one of several does, and only that one raises if it cannot.
        files: The file system; None to tell it by the path.

    Returns:
        The path.

    Raises:
        CheckpointError: A tensor that cannot be stored, or a file that cannot be written.
        ConfigError: An unknown dtype.
    """
    target = os.fspath(path)
    outgoing = Outgoing(tensors, floating_dtype(dtype), f"the weights for {target!r}")
    if not write:
        outgoing.gather_rest(tensors)
        return target
    try:
        state = _state(tensors, outgoing)
    except DrivetrainError:
        outgoing.gather_rest(tensors)  # the others wait for this process in the next gathering
        raise
    with os_errors("write", target):
        _write(state, target, file_system(target) if files is None else files)
    return target


def _state(tensors: Mapping[str, Tensor], outgoing: Outgoing) -> dict[str, Tensor]:
    """Plain tensors on the CPU; those that were one are one."""
    state: dict[str, Tensor] = {}
    made: dict[object, Tensor] = {}
    for name, tensor in tensors.items():
        # Not for shards: whether two are one must be the same on all processes, and some may have none of it.
        key = name if is_sharded(tensor) else _memory(tensor)
        if key not in made:
            value = outgoing.take(name).to("cpu").resolve_conj().resolve_neg().contiguous()
            # With a view, torch.save writes all of the memory that it is a view of.
            is_part = value.untyped_storage().nbytes() > value.numel() * value.element_size()
            made[key] = value.clone() if is_part else value
        state[name] = made[key]
    return state


def _memory(tensor: Tensor) -> object:
    """The same for two tensors that are one, as the two names of a tied parameter in a state dict."""
    address = tensor.data_ptr() or id(tensor)  # XLA's tensors have none; each is then by itself
    return tensor.device, address, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj()


def _write(state: dict[str, Tensor], target: str, files: FileSystem) -> None:
    path = files.absolute(target)
    parent, name = files.split(path)
    hidden = f"{SAVING}{name}"
    files.make_directory(parent)
    if files.renames:
        delete_if_there(files.join(parent, hidden), files)  # what a killed export to this path has left
    with replacing(path, hidden, files) as place, finished(files.create(place)) as sink:
        stream = _Stream(sink)
        try:
            torch.save(state, stream)  # type: ignore[arg-type]  # it needs nothing but `write` and `flush`
        except Exception:
            if stream.error is not None:
                raise stream.error from None  # torch's own says only that it could not write
            raise


class _Stream:
    """What torch.save writes to.

    Args:
        sink: The new file.

    Attributes:
        error: Why the file could not be written; None if it could.
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
        """Do nothing: no byte is kept back."""
