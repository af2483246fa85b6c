"""Reading weights, wherever they are: a file, a folder, a checkpoint, a run; no code of a file is run."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Mapping

from torch import Tensor

from drivetrain.checkpoint.files import HashedReader
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, FileSystem, Kind, os_errors
from drivetrain.checkpoint.format import MANIFEST
from drivetrain.checkpoint.io import DirectoryCheckpointIO
from drivetrain.checkpoint.locate import CHECKPOINTS, foreign_hint, load_newest
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.records import TENSORS
from drivetrain.checkpoint.tensors import read_header, read_tensors
from drivetrain.checkpoint.torch_weights import PICKLES, TorchWeights, read_torch_weights
from drivetrain.checkpoint.weight_files import INDEX, MODEL, WeightFiles, parse_index
from drivetrain.errors import CheckpointError


def load_weights(source: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the weights that are at a path, each tensor once, into the CPU's memory.

    The path is one of

    - a safetensors file, or the index of several, such as `model.safetensors.index.json` or
      `pytorch_model.bin.index.json`;
    - a folder of Hugging Face's with `model.safetensors` or `model.safetensors.index.json`;
    - a checkpoint;
    - a run directory: its newest good checkpoint is read, or without checkpoints the finished weights;
    - a file of `torch.save` (".ckpt", ".pt", ".pth", ".bin"): a checkpoint of Lightning or Composer, or a
      state dict, by itself or under "state_dict" or "model". Only its weights are read. Nothing that it
      names is run.

    Symbolic links to files of weights are followed, as the caches of model hubs are full of them. Safetensors
    files have no hash, so a changed number in one goes unseen; checkpoints, and files of `torch.save`, have.

    Args:
        source: The path; also an address such as "s3://bucket/run".

    Returns:
        The tensors by name; of a file of `torch.save` without the "module." and "_orig_mod." of wrappers.

    Raises:
        DamagedCheckpointError: Not what was written, or no well-formed file.
        CheckpointError: Nothing there, no weights, or no permission; says what was looked for and what is
            near.
    """
    return find_weights(source)[0]


def find_weights(source: str | os.PathLike[str]) -> tuple[dict[str, Tensor], str]:
    """As `load_weights`; and, of another program's file, what was taken and what was not, in words."""
    path = os.fspath(source)
    if is_torch_file(path):
        found = torch_weights(path)
        return found.tensors, found.note
    return _load(path), ""


def is_weight_file(path: str) -> bool:
    """Whether a path leads to a single file of weights, and not to a checkpoint or a run."""
    if not path.endswith((TENSORS, INDEX, *PICKLES)):
        return False
    files = file_system(path)
    return _has(files.absolute(path), files)


def is_torch_file(path: str) -> bool:
    """Whether a path leads to a file that `torch.save` has written, by its name."""
    return path.endswith(PICKLES) and is_weight_file(path)


def torch_weights(path: str) -> TorchWeights:
    """The weights in a file of `torch.save`, links followed; see `read_torch_weights`.

    A warning says when they are Lightning's averages, and the model's own weights are in the file as well.
    """
    files = file_system(path)
    found = read_torch_weights(_followed(files.absolute(path), files), files)
    if found.averaged:
        warnings.warn(
            f"{path!r} has averaged weights as 'state_dict' and the model's own as 'current_model_state': the"
            " averages are taken. For the own ones export the latter from Lightning",
            stacklevel=3,
        )
    return found


def _load(path: str) -> dict[str, Tensor]:
    files = file_system(path)
    path = files.absolute(path)
    with os_errors("read", path):
        kind = files.kind(_followed(path, files))
        names = {} if kind == "file" else files.entries(path)
    if kind == "file":
        return _from_file(path, files)
    parent, name = files.split(path)
    if names:
        return _from_folder(path, files, names)
    if name.endswith(TENSORS) and _has(files.join(parent, WeightFiles(name).index), files):
        # Exported to this path, in several files.
        return _from_index(files.join(parent, WeightFiles(name).index), files)
    if kind == "directory":
        raise CheckpointError(f"no weights in {path!r}: it is empty")
    raise CheckpointError(f"no weights at {path!r}: there is no such file or directory.{_near(path, files)}")


def _from_folder(path: str, files: FileSystem, names: Mapping[str, Kind]) -> dict[str, Tensor]:
    io = DirectoryCheckpointIO()
    if io.exists(path) or io.list(files.join(path, CHECKPOINTS)) or io.list(path):
        return load_newest(path, ("model",))[1].tensors["model"]
    for name in (MODEL, WeightFiles(MODEL).index):  # a single file first, as others do
        if name in names:
            return _from_file(files.join(path, name), files)
    looked_for = f"{MODEL}, {WeightFiles(MODEL).index}, {MANIFEST} of a checkpoint, and checkpoints"
    raise CheckpointError(
        f"no weights in {path!r}. Looked for {looked_for} in it and in its {CHECKPOINTS!r}."
        f"{_others(path, files, sorted(names))}"
    )


def _others(path: str, files: FileSystem, names: Collection[str]) -> str:
    """What to do with what is there instead."""
    indices = [name for name in names if name.endswith(INDEX)]
    single = [name for name in names if name.endswith(TENSORS)]
    pickles = [name for name in names if name.endswith(PICKLES)]
    hint = foreign_hint(names)
    if hint or not (indices or single or pickles):
        return hint
    shown = ", ".join(repr(files.join(path, name)) for name in (indices or single or pickles)[:3])
    return f" Give the path of a file, such as {shown}"


def _from_file(path: str, files: FileSystem) -> dict[str, Tensor]:
    if path.endswith(INDEX):
        return _from_index(path, files)
    with HashedReader(_followed(path, files), files) as reader:
        return read_tensors(reader)


def _from_index(path: str, files: FileSystem) -> dict[str, Tensor]:
    with HashedReader(_followed(path, files), files) as reader:
        places = parse_index(reader.read_json(), repr(path))
    directory = files.split(path)[0]
    with os_errors("list", directory):
        present = files.entries(directory)
    parts = {file: _followed(files.join(directory, file), files) for file in places if file in present}
    missing = sorted(file for file in places if file not in parts or not _has(parts[file], files))
    if missing:
        raise DamagedCheckpointError(
            f"{path!r} names {len(places)} files, of which {len(missing)} are missing in {directory!r}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}. Fetch or copy these too"
        )
    for file, real in parts.items():  # all headers first, so that nothing large is read in vain
        if file.endswith(TENSORS):
            with HashedReader(real, files) as reader:
                _check_names(path, file, {span.name for span in read_header(reader)}, set(places[file]))
    tensors: dict[str, Tensor] = {}
    for file, real in parts.items():
        if file.endswith(TENSORS):
            with HashedReader(real, files) as reader:
                tensors.update(read_tensors(reader))
        else:
            found = read_torch_weights(real, files).tensors
            _check_names(path, file, set(found), set(places[file]))
            tensors.update(found)
    return tensors


def _check_names(index: str, file: str, found: set[str], told: set[str]) -> None:
    if found == told:
        return
    name = min(found ^ told)
    what = "which the file does not hold" if name in told else "which the file holds all the same"
    places = "places" if name in told else "does not place"
    raise DamagedCheckpointError(
        f"{index!r} {places} {name!r} in {file!r}, {what} ({len(found ^ told)} such). The files are not "
        "those of the index: fetch or export all of them again"
    )


def _followed(path: str, files: FileSystem) -> str:
    """The path without symbolic links, which only a disk has."""
    return os.path.realpath(path) if files.renames else path


def _has(path: str, files: FileSystem) -> bool:
    with os_errors("read", path):
        return files.kind(_followed(path, files)) == "file"


def _near(path: str, files: FileSystem) -> str:
    parent, last = files.split(path)
    with os_errors("list", parent):
        names = sorted(files.entries(parent))
    if not names:
        return f" There is nothing in {parent!r} either."
    near = difflib.get_close_matches(last, names, n=3, cutoff=0.3)
    return f" Near it are: {', '.join(repr(files.join(parent, name)) for name in near)}." if near else ""
