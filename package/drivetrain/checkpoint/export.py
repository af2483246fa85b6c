"""Weights as plain safetensors files, for use without this package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor

from drivetrain.checkpoint.dtypes import floating_dtype
from drivetrain.checkpoint.files import SAVING, Bytes, delete_if_there, replacing, write_file
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, os_errors
from drivetrain.checkpoint.format import MANIFEST
from drivetrain.checkpoint.outgoing import Outgoing
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.tensors import plan_spans, tensor_chunks
from drivetrain.checkpoint.weight_files import MODEL, WeightFiles, divide, dump_index, parse_size
from drivetrain.errors import CheckpointError, ConfigError, DrivetrainError


def export_weights(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "50 GB",
    write: bool = True,
    files: FileSystem | None = None,
) -> list[str]:
    """Write safetensors that `safetensors.torch.load_file` and ``load_state_dict(strict=True)`` take.

    One file; above `max_shard_size` several with an index, as Hugging Face's libraries write them. Tied
    tensors are written under each of their names.

    An earlier export to the same path is replaced. A single file on a disk is replaced in one step. With
    several files, or in an object store, a kill leaves the old export, the new one, or nothing that loads;
    the next export removes the remains.

    Args:
        tensors: By name, as in a state dict; any device and strides. Of `DTensor`s, one at a time is whole in
            memory, and every process that holds a part must call this, with tensors of the same names in
            the same order.
        path: The file, such as "model.safetensors"; also an address such as "s3://bucket/model.safetensors".
        dtype: What to convert floating-point tensors to: "float32", "bf16"... or a `torch.dtype`; None for
            what each has.
        max_shard_size: The most bytes of tensors in a file: a number, or a text such as "5 GB".
        write: Whether this process writes; one of several does, and only that one raises if it cannot.
        files: The file system; None to tell it by the path.

    Returns:
        The paths of the files, the index last.

    Raises:
        CheckpointError: A tensor that the format or the dtype cannot hold, or a file that cannot be written.
        ConfigError: An unknown dtype, or a size that is none.
    """
    target = os.fspath(path)
    place = _Place(target, file_system(target) if files is None else files)
    outgoing = Outgoing(tensors, floating_dtype(dtype), f"the weights for {target!r}")
    shares = divide(outgoing.planned, parse_size(max_shard_size))
    names = [place.names.single] if len(shares) == 1 else place.names.several(len(shares))
    plans = [{name: outgoing.planned[name] for name in share} for share in shares]
    order = [span.name for plan in plans for span in plan_spans(plan, f"the weights for {target!r}")]
    if write:
        try:
            place.write(dict(zip(names, plans, strict=True)), outgoing)
        except DrivetrainError:
            outgoing.gather_rest(order)  # the others wait for this process in the next gathering
            raise
    else:
        outgoing.gather_rest(order)
    return [place.given(name) for name in (names if len(names) == 1 else [*names, place.names.index])]


class _Place:
    """The directory that weights are exported to, and their names there.

    Args:
        target: The path of a single file, as the user gave it.
        files: Where.
    """

    def __init__(self, target: str, files: FileSystem) -> None:
        self.files = files
        self.target = target
        self.directory, name = files.split(files.absolute(target))
        if not name or target.endswith(("/", os.sep)):
            raise ConfigError(f"{target!r} is no file; give its name too, such as {target + MODEL!r}")
        self.names = WeightFiles(name)
        # One name for the files of all exports to this path, so that those of a killed one are found without
        # listing a directory that may hold thousands of others.
        self.hidden = f"{SAVING}{name}"

    def given(self, name: str) -> str:
        """The path of a file beside the target, relative if that was."""
        return self.files.join(self.files.split(self.target)[0], name)

    def write(self, plans: Mapping[str, Mapping[str, Tensor]], outgoing: Outgoing) -> None:
        """Write and commit all files.

        Args:
            plans: File to what it is to hold.
            outgoing: The tensors.

        Raises:
            CheckpointError: It cannot be done; what is unfinished is deleted.
        """
        with os_errors("write", self.target):
            self._check_free()
            self.files.make_directory(self.directory)
            # A killed export to this path, or one in several files, may have left more than this replaces.
            killed = self._has(self.hidden)
            if killed:
                self.files.delete(self._at(self.hidden))
            others = killed or not self.files.renames or len(plans) > 1 or self._has(self.names.index)
            known = set(self.files.entries(self.directory)) if others else set()
            older = sorted(name for name in known if self.names.is_one_of_several(name))
            if len(plans) == 1:
                self._write_one(next(iter(plans)), plans, outgoing)
                self._delete([*older, *known & {self.names.index}])
            else:
                # Before the new files come, as they may have the names of the old: with neither index nor old
                # files there is no moment at which some of both are taken for a whole.
                stale = [*sorted(known & {self.names.index}), *older]
                self._write_several(plans, outgoing, stale)
                self._delete(sorted(known & {self.names.single}))

    def _check_free(self) -> None:
        if self.files.kind(self.files.absolute(self.target)) == "directory":
            inside = self.files.join(self.target, MODEL)
            raise ConfigError(f"{self.target!r} is a directory; give a file, such as {inside!r}")
        if self.files.kind(self._at(MANIFEST)) == "file" and self._is_checkpoint():
            raise CheckpointError(
                f"{self.target!r} is inside a checkpoint, whose files must stay as they are. Choose another "
                "directory"
            )

    def _is_checkpoint(self) -> bool:
        try:
            Reader(self.files, self.directory)
        except DamagedCheckpointError:  # other programs have files of that name too
            return False
        return True

    def _write_one(self, name: str, plans: Mapping[str, Mapping[str, Tensor]], outgoing: Outgoing) -> None:
        chunks = _content(plans[name], outgoing, self.target)
        with replacing(self._at(name), self.hidden, self.files) as place:
            write_file(place, chunks, self.files)

    def _write_several(
        self, plans: Mapping[str, Mapping[str, Tensor]], outgoing: Outgoing, stale: list[str]
    ) -> None:
        places = {name: file for file, plan in plans.items() for name in plan}
        total = sum(each.numel() * each.element_size() for each in outgoing.planned.values())
        if not self.files.renames:
            self._delete(stale)
            for file, plan in plans.items():
                write_file(self._at(file), _content(plan, outgoing, self.target), self.files)
            write_file(self._at(self.names.index), [dump_index(total, places)], self.files)
            return
        hidden = self._at(self.hidden)
        try:
            self.files.make_directory(hidden)
            for file, plan in plans.items():
                path = self.files.join(hidden, file)
                write_file(path, _content(plan, outgoing, self.target), self.files)
            index = self.files.join(hidden, self.names.index)
            write_file(index, [dump_index(total, places)], self.files)
            self._delete(stale)
            for file in plans:
                self.files.rename(self.files.join(hidden, file), self._at(file))
            self.files.sync(self.directory)
            self.files.rename(index, self._at(self.names.index))
        except BaseException:
            delete_if_there(hidden, self.files)
            raise
        self.files.sync(self.directory)
        self._delete([self.hidden])

    def _delete(self, names: list[str]) -> None:
        """Delete some files, in this order also for a power cut."""
        for name in names:
            self.files.delete(self._at(name))
            self.files.sync(self.directory)

    def _has(self, name: str) -> bool:
        return self.files.kind(self._at(name)) is not None

    def _at(self, name: str) -> str:
        return self.files.join(self.directory, name)


def _content(plan: Mapping[str, Tensor], outgoing: Outgoing, target: str) -> Iterator[Bytes]:
    """The bytes of a file, for `write_file`; takes the tensors one at a time."""
    what = f"the weights for {target!r}"
    # The first chunk is the header, which needs dtypes and shapes only.
    yield next(tensor_chunks(plan, what))
    for span in plan_spans(plan, what):
        alone = tensor_chunks({span.name: outgoing.take(span.name)}, what)
        yield from islice(alone, 1, None)
