"""Export weights as plain safetensors files, for use without this package."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice

import torch
from torch import Tensor

from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.format.strict_json import dump_json
from drivetrain.checkpoint.format.tensors import WRITER, file_layout, has_plain_bytes, tensor_chunks
from drivetrain.checkpoint.storage.files import Bytes, delete_if_there, write_file
from drivetrain.checkpoint.storage.filesystem import SAVING, FileSystem, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import floating_dtype
from drivetrain.checkpoint.weights.files import MODEL, WeightFiles, divide, dump_index
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors, TensorSource
from drivetrain.core.errors import CheckpointError, ConfigError, DrivetrainError
from drivetrain.core.types import Json
from drivetrain.core.validation import byte_count

_HEAD = 200
_OURS = dump_json(WRITER, "the mark")[1:-1]


def export_weights(
    tensors: Mapping[str, Tensor] | TensorSource,
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "50 GB",
    write: bool = True,
    files: FileSystem | None = None,
    overwrite: bool = False,
    frozen: Json = None,
) -> list[str]:
    """Write safetensors for `safetensors.torch.load_file` and ``load_state_dict(strict=True)``.

    The result is one file; above `max_shard_size` it is several with an index, as in Hugging Face's
    libraries.
    Tied tensors are written under each of their names.

    An earlier export to the same path is replaced; no other file is. A single file on a disk is replaced in
    one step. With several files, or in an object store, a kill leaves the old export, the new one, or nothing
    loadable; the next export removes the remains.

    Args:
        tensors: The tensors by name, as in a state dict; any device and strides. `DTensor`s are gathered one
            at a time, and every process that holds a part must call this, with the same names in the same
            order. Or a source that makes each tensor when it is written.
        path: The file, such as "model.safetensors"; also an address such as "s3://bucket/model.safetensors".
        dtype: The dtype for floating-point tensors: "float32", "bf16"... or a `torch.dtype`; None keeps each.
            A source chooses its dtype itself.
        max_shard_size: The most bytes of tensors in a file: a number, or a text such as "5 GB".
        write: Whether this process writes. One of several processes does, and only that one raises on
            failure.
        files: The file system; None chooses it by the path.
        overwrite: Replace files of these names even if drivetrain has not written them.
        frozen: The fingerprints of the frozen parameters that `tensors` leaves out, such as an adapter's
            base, by name. The files have them, and `TaskModule.load_weights` refuses other parameters.

    Returns:
        The paths of the files, the index last.

    Raises:
        CheckpointError: The format or the dtype cannot store a tensor, a file cannot be written, or a file
            that drivetrain has not written is in the way.
        ConfigError: The dtype is unknown, or the size is invalid.
    """
    target = os.fspath(path)
    what = f"the weights for {target!r}"
    export = _Target(target, file_system(target) if files is None else files, overwrite, frozen)
    lazy: TensorSource
    lazy = tensors if isinstance(tensors, TensorSource) else LazyTensors(tensors, floating_dtype(dtype), what)
    for name, tensor in () if isinstance(tensors, TensorSource) else tensors.items():
        if not has_plain_bytes(tensor):
            raise CheckpointError(
                f"{what}, {name!r}: a {type(tensor.detach()).__qualname__} has no plain bytes for a"
                " safetensors file. torch.save(state_dict, path) writes it"
            )
    shares = divide(lazy.specs, byte_count("max_shard_size", max_shard_size))
    names = [export.names.single] if len(shares) == 1 else export.names.several(len(shares))
    layouts = [{name: lazy.specs[name] for name in share} for share in shares]
    order = [span.name for layout in layouts for span in file_layout(layout, what)[0]]
    if write:
        try:
            export.write(dict(zip(names, layouts, strict=True)), lazy)
        except DrivetrainError:
            lazy.gather_rest(order)  # the other processes wait for this one in the next gather
            raise
    else:
        lazy.gather_rest(order)
    return [export.given(name) for name in (names if len(names) == 1 else [*names, export.names.index])]


class _Target:
    """The directory of an export, and the names of its files.

    Args:
        target: The user's path of a single file.
        files: The file system.
        overwrite: See `export_weights`.
        frozen: See `export_weights`.
    """

    def __init__(self, target: str, files: FileSystem, overwrite: bool, frozen: Json) -> None:
        self.files = files
        self._left_out = dump_json(frozen, target).decode() if frozen else ""
        self.overwrite = overwrite
        self.target = target
        self.directory, name = files.split(files.absolute(target))
        if not name or target.endswith(("/", os.sep)):
            raise ConfigError(f"{target!r} is a directory; add a file name, such as {target + MODEL!r}")
        self.names = WeightFiles(name)
        # All exports to this path use one temporary name, so that the files of a killed one are found without
        # listing a directory that may have thousands of others.
        self.hidden = f"{SAVING}{name}"

    def given(self, name: str) -> str:
        """Return the path of a file in the target's directory, relative if the target is."""
        return self.files.join(self.files.split(self.target)[0], name)

    def write(self, layouts: Mapping[str, Mapping[str, Tensor]], lazy: TensorSource) -> None:
        """Write and commit all files.

        Args:
            layouts: The tensors of each file, by name.
            lazy: The tensors.

        Raises:
            CheckpointError: The write failed; unfinished files are deleted.
        """
        with os_errors("write", self.target):
            self._check_free()
            self.files.make_directory(self.directory)
            # A killed export, or one in several files, may have left more files than this one replaces.
            killed = self._has(self.hidden)
            if killed:
                self.files.delete(self._at(self.hidden))
            others = killed or not self.files.renames or len(layouts) > 1 or self._has(self.names.index)
            known = set(self.files.entries(self.directory)) if others else set()
            several = sorted(name for name in known if self.names.is_one_of_several(name))
            older = [*known & {self.names.index}, *several]
            for name in {self.names.single, *older}:
                if self._has(name):
                    self._check_own(name)
            contents: dict[str, Iterable[Bytes]]
            contents = {
                file: _content(layout, lazy, self.target, self._left_out) for file, layout in layouts.items()
            }
            if len(layouts) == 1:
                self._commit(contents, [])
                self._delete(older[::-1])  # the index last: it says to the next export that there are others
            else:
                weight_map = {name: file for file, layout in layouts.items() for name in layout}
                total = sum(each.numel() * each.element_size() for each in lazy.specs.values())
                contents[self.names.index] = [dump_index(total, weight_map)]
                # Delete first, because the new files may have the names of the old: without the index and the
                # old files, a mixture of both can never count as a complete export.
                self._commit(contents, older)
                self._delete([*known & {self.names.single}])

    def _check_free(self) -> None:
        if self.files.kind(self.files.absolute(self.target)) == "directory":
            inside = self.files.join(self.target, MODEL)
            raise ConfigError(f"{self.target!r} is a directory; give a file, such as {inside!r}")
        if self.files.kind(self._at(MANIFEST)) == "file":
            raise CheckpointError(
                f"{self.target!r} is beside a {MANIFEST}, as the files of a checkpoint are, which must not"
                " change. Choose another directory"
            )

    def _check_own(self, name: str) -> None:
        if self.overwrite:
            return
        if self.files.kind(self._at(name)) == "file":
            with closing(self.files.open(self._at(name))) as source:
                head = bytes(source.read(_HEAD)).replace(b" ", b"")
            if not head or _OURS in head:
                return
        raise CheckpointError(
            f"{self.given(name)!r} is a file that drivetrain has not written, and stays as it is. Remove"
            " it, give another path, or overwrite=True"
        )

    def _commit(self, contents: Mapping[str, Iterable[Bytes]], stale: list[str]) -> None:
        """Write the files, delete stale ones, and give the new ones their names, the last when all have."""
        if not self.files.renames:
            self._delete(stale)
            for file, chunks in contents.items():
                write_file(self._at(file), chunks, self.files)
            return
        hidden = self._at(self.hidden)
        *first, last = contents
        try:
            self.files.make_directory(hidden)
            for file, chunks in contents.items():
                write_file(self.files.join(hidden, file), chunks, self.files)
            self._delete(stale)
            for file in first:
                self.files.rename(self.files.join(hidden, file), self._at(file))
            if first:
                self.files.sync(self.directory)
            self.files.rename(self.files.join(hidden, last), self._at(last))
        except BaseException:
            delete_if_there(hidden, self.files)
            raise
        self.files.sync(self.directory)
        self._delete([self.hidden])

    def _delete(self, names: list[str]) -> None:
        """Delete some files in order, even if the power is cut in between."""
        for name in names:
            self.files.delete(self._at(name))
            self.files.sync(self.directory)

    def _has(self, name: str) -> bool:
        return self.files.kind(self._at(name)) is not None

    def _at(self, name: str) -> str:
        return self.files.join(self.directory, name)


def _content(layout: Mapping[str, Tensor], lazy: TensorSource, target: str, left_out: str) -> Iterator[Bytes]:
    """Yield the bytes of a file, for `write_file`; uses the tensors one at a time."""
    what = f"the weights for {target!r}"
    spans, header = file_layout(layout, what, left_out)
    yield header
    for span in spans:
        alone = tensor_chunks({span.name: lazy.materialize(span.name)}, what)
        yield from islice(alone, 1, None)
