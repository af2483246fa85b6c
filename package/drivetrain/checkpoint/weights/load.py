"""Load weights from a file, a folder, a checkpoint or a run, without running code from a file."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.format.records import TENSORS
from drivetrain.checkpoint.format.tensors import DTYPES, read_header, read_left_out, read_tensors, room_for
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS, load_newest, near
from drivetrain.checkpoint.storage.files import HashedReader
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, FileSystem, Kind, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.files import INDEX, MODEL, WeightFiles, parse_index
from drivetrain.checkpoint.weights.frozen import FROZEN
from drivetrain.checkpoint.weights.stored_rows import FileTensor, version_of
from drivetrain.checkpoint.weights.torch_files import PICKLES, TorchWeights, read_torch_weights
from drivetrain.core.errors import CheckpointError
from drivetrain.core.files import check_path, odd_kind
from drivetrain.core.messages import logger
from drivetrain.core.types import Json

_LOG = logger(__name__)

Take: TypeAlias = Callable[[str, FileSystem], dict[str, Any]]
"""A function from a safetensors file to what is taken of its tensors, by name."""


def load_weights(source: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Load weights into the CPU's memory, each tensor once.

    The path is one of

    - a safetensors file, or the index of several, such as `model.safetensors.index.json` or
      `pytorch_model.bin.index.json`;
    - a Hugging Face folder with `model.safetensors` or `model.safetensors.index.json`;
    - a checkpoint;
    - a run directory: its newest good checkpoint, or without checkpoints the finished weights;
    - a `torch.save` file (".ckpt", ".pt", ".pth", ".bin"): a checkpoint of Lightning or Composer, or a state
      dict, by itself or under "state_dict" or "model". Only its weights are read, and no code in it is run.

    Symbolic links to weight files are followed, because the caches of model hubs consist of them. Safetensors
    files have no hash, so a changed number goes unnoticed; checkpoints and `torch.save` files have hashes.

    Args:
        source: The path; also an address such as "s3://bucket/run".

    Returns:
        The tensors by name. Names in a `torch.save` file lose the wrappers' "module." and "_orig_mod.".

    Raises:
        DamagedCheckpointError: A file is damaged or malformed.
        CheckpointError: The path does not exist, has no weights, or may not be read; names the paths
            searched, and similar paths.
    """
    return find_weights(source).tensors


class Found(NamedTuple):
    """Weights, and what is known of them.

    Attributes:
        tensors: By name; of `describe_weights`, those in safetensors files as `FileTensor`.
        note: For another program's file, what was read and what was not.
        frozen: For a checkpoint or an export that leaves out frozen parameters, its object `FROZEN`.
        path: The source's name for messages, if a caller passes the weights on.
    """

    tensors: dict[str, Any]
    note: str = ""
    frozen: Json = None
    path: str = ""


def find_weights(source: str | os.PathLike[str], *, mapped: bool = False) -> Found:
    """Load weights as `load_weights`.

    Args:
        source: The path.
        mapped: Map plain safetensors files on a disk instead of reading them: for tensors that are copied
            and dropped. The numbers are then in memory once for all processes of a machine.
    """
    return _found(source, _map if mapped else _read)


def describe_weights(source: str | os.PathLike[str]) -> Found:
    """Find weights as `load_weights`, and read only the headers of safetensors files on a disk.

    Weights in other files, and at an address, are read whole.
    """
    return _found(source, _describe)


def is_weight_file(path: str) -> bool:
    """Return whether a path is a single file of weights, not a checkpoint or a run."""
    if not path.endswith((TENSORS, INDEX, *PICKLES)):
        return False
    files = file_system(path)
    return _has(files.absolute(path), files)


def is_torch_file(path: str) -> bool:
    """Return whether a path is a `torch.save` file, by its name."""
    return path.endswith(PICKLES) and is_weight_file(path)


def torch_weights(path: str) -> TorchWeights:
    """Read the weights in a `torch.save` file, following links; see `read_torch_weights`.

    Warns of what the file's layout has to say, such as that the weights are averages.
    """
    files = file_system(path)
    found = read_torch_weights(_followed(files.absolute(path), files), files)
    if found.warning:
        _LOG.warning(f"{path!r} {found.warning}")
    return found


def _found(source: str | os.PathLike[str], take: Take) -> Found:
    path = os.fspath(source)
    if is_torch_file(path):
        found = torch_weights(path)
        return Found(_kept(found.tensors, take), found.note)
    files = file_system(path)
    path = files.absolute(path)
    with os_errors("read", path):
        kind = files.kind(_followed(path, files))
        names = {} if kind == "file" else files.entries(path)
    if kind == "file":
        return _from_file(path, files, take)
    parent, name = files.split(path)
    if names:
        return _from_folder(path, files, names, take)
    if name.endswith(TENSORS) and _has(files.join(parent, WeightFiles(name).index), files):
        # Exported to this path, in several files.
        return _from_index(files.join(parent, WeightFiles(name).index), files, take)
    if kind == "directory":
        raise CheckpointError(f"no weights in {path!r}: it is empty")
    odd = odd_kind(path) if files.renames else None
    if odd is not None:
        raise CheckpointError(f"no weights at {path!r}: it {odd}. Give a file or a directory")
    raise CheckpointError(f"no weights at {path!r}: there is no such file or directory.{near(path, files)}")


def _from_folder(path: str, files: FileSystem, names: Mapping[str, Kind], take: Take) -> Found:
    io = DirectoryCheckpointIO()
    if io.exists(path) or io.list(files.join(path, CHECKPOINTS)) or io.list(path):
        snapshot = load_newest(path, ("model",))[1]
        return Found(snapshot.tensors["model"], frozen=snapshot.objects.get(FROZEN))
    if MANIFEST in names or _is_listed(path, files):
        is_there = "is no file" if MANIFEST in names else "is missing"
        raise DamagedCheckpointError(
            f"{path!r} is a checkpoint whose {MANIFEST} {is_there}, so nothing in it can be verified."
            f" Take another checkpoint, or give the file {files.join(path, MODEL)!r} to take it unverified"
        )
    for name in (MODEL, WeightFiles(MODEL).index):  # a single file first, as in other libraries
        if name in names:
            return _from_file(files.join(path, name), files, take)
    looked_for = f"{MODEL}, {WeightFiles(MODEL).index}, {MANIFEST} of a checkpoint, and checkpoints"
    raise CheckpointError(
        f"no weights in {path!r}. Looked for {looked_for} in it and in its {CHECKPOINTS!r}."
        " Give the path of another file"
    )


def _is_listed(path: str, files: FileSystem) -> bool:
    """Return whether the index beside a folder lists it as a checkpoint."""
    parent, name = files.split(path)
    try:
        return any(entry.name == name for entry in read_index(parent, files) or ())
    except CheckpointError:  # an index of something else, or one that cannot be read
        return False


def _from_file(path: str, files: FileSystem, take: Take) -> Found:
    if path.endswith(INDEX):
        return _from_index(path, files, take)
    real = _followed(path, files)
    return Found(take(real, files), frozen=_left_out(real, files))


def _left_out(path: str, files: FileSystem) -> Json:
    with HashedReader(path, files) as reader:
        return read_left_out(reader)


def _read(path: str, files: FileSystem) -> dict[str, Any]:
    """Read all tensors of a safetensors file."""
    with HashedReader(path, files) as reader:
        return dict(read_tensors(reader))


def _kept(mapped: dict[str, Tensor], take: Take) -> dict[str, Tensor]:
    """Copy the tensors of a mapped `torch.save` file for a caller who keeps them."""
    return copy.deepcopy(mapped) if take is _read else mapped


def _map(path: str, files: FileSystem) -> dict[str, Any]:
    """Map the tensors of a safetensors file on a disk."""
    if not files.renames:
        return _read(path, files)
    with HashedReader(path, files) as reader:
        for span in read_header(reader):  # whose errors say which tensor is wrong
            if span.start == span.stop:  # the file's size does not bound the shape of an empty tensor
                room_for(span.shape, span.dtype, f"{path!r}: {span.name!r}")
    try:
        with os_errors("read", path), safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.offset_keys()}
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path!r} is not a safetensors file: {error}") from error


def _describe(path: str, files: FileSystem) -> dict[str, Any]:
    """Return the positions of the tensors of a safetensors file on a disk."""
    if not files.renames:
        return _read(path, files)
    with os_errors("read", path):
        version = version_of(path)
    with HashedReader(path, files) as reader:
        spans = read_header(reader)
    return {span.name: FileTensor(path, span.name, DTYPES[span.dtype], span.shape, version) for span in spans}


def _from_index(path: str, files: FileSystem, take: Take) -> Found:
    with HashedReader(_followed(path, files), files) as reader:
        weight_map = parse_index(reader.read_json(), repr(path))
    directory = files.split(path)[0]
    with os_errors("list", directory):
        present = files.entries(directory)
    parts = {file: _followed(files.join(directory, file), files) for file in weight_map if file in present}
    missing = sorted(file for file in weight_map if file not in parts or not _has(parts[file], files))
    if missing:
        raise DamagedCheckpointError(
            f"{path!r} names {len(weight_map)} files, and {len(missing)} are missing in {directory!r}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Fetch or copy these too"
        )
    for file, real in parts.items():  # all headers first, before anything large is read
        if file.endswith(TENSORS):
            with HashedReader(real, files) as reader:
                _check_names(path, file, {span.name for span in read_header(reader)}, set(weight_map[file]))
    tensors: dict[str, Any] = {}
    frozen: Json = None
    for file, real in parts.items():
        if file.endswith(TENSORS):
            tensors.update(take(real, files))
            frozen = _left_out(real, files)  # the same in each
        else:
            found = _kept(read_torch_weights(real, files).tensors, take)
            _check_names(path, file, set(found), set(weight_map[file]))
            tensors.update(found)
    return Found(tensors, frozen=frozen)


def _check_names(index: str, file: str, found: set[str], told: set[str]) -> None:
    if found == told:
        return
    name = min(found ^ told)
    what = "but the file does not contain it" if name in told else "but the file contains it"
    verb = "places" if name in told else "does not place"
    raise DamagedCheckpointError(
        f"{index!r} {verb} {name!r} in {file!r}, {what} (differing names: {len(found ^ told)}). The files "
        "do not belong to the index: fetch or export all of them again"
    )


def _followed(path: str, files: FileSystem) -> str:
    """Return the path with symbolic links resolved; only a disk has them."""
    if not files.renames:
        return path
    check_path(path)
    return os.path.realpath(path)


def _has(path: str, files: FileSystem) -> bool:
    with os_errors("read", path):
        return files.kind(_followed(path, files)) == "file"
