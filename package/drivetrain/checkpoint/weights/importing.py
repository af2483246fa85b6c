"""Import a weight file of another program as a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tree import pack
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.load import is_torch_file, load_weights, torch_weights
from drivetrain.checkpoint.weights.rename import Rename, renamed
from drivetrain.core.errors import CheckpointError
from drivetrain.core.progress import Progress
from drivetrain.core.types import Json


@dataclass(frozen=True)
class ImportedWeights:
    """The result of `import_weights`; its text is a line.

    Attributes:
        path: The new checkpoint.
        origin: A note on what was read, and what was not.
        tensors: The number of weights and buffers.
        arguments: The constructor's arguments that were stored.
        unstored: The arguments that no file can store; `from_checkpoint` asks for them.
        dropped: The names that `rename` dropped.
    """

    path: str
    origin: str
    tensors: int
    arguments: tuple[str, ...] = ()
    unstored: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.path}: {self.tensors} tensors"]
        if self.arguments:
            parts.append(f"the arguments {', '.join(self.arguments)}")
        if self.unstored:
            parts.append(f"without the arguments {', '.join(self.unstored)}, which no file can hold")
        return f"{', '.join(parts)}; from {self.origin}"


def import_weights(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, rename: Rename | None = None
) -> ImportedWeights:
    """Write a checkpoint from a file of weights, such as a checkpoint of Lightning or Composer.

    Nothing that a pickle names is run or imported. The checkpoint can be loaded (`task.load_weights`,
    `Task.from_checkpoint`), but no run can resume from it: no optimizer state is read.

    Args:
        source: A path that `checkpoint.load_weights` reads.
        path: The checkpoint to write; also an address.
        rename: The rule from source names to the task's, as for `task.load_weights`.

    Returns:
        A summary of the new checkpoint.

    Raises:
        CheckpointError: The source is not readable, or `path` exists.
        ConfigError: `rename` has a wrong type.
    """
    storage, given, target = DirectoryCheckpointIO(), os.fspath(source), os.fspath(path)
    if storage.exists(target):
        raise CheckpointError(f"there is a checkpoint at {target!r} already, and nothing is ever overwritten")
    read = torch_weights(given) if is_torch_file(given) else None
    tensors = read.tensors if read is not None else load_weights(given)
    names, dropped = renamed({name: name for name in tensors}, rename, repr(given))
    snapshot = Snapshot(
        tensors={"model": {new: tensors[old] for new, old in names.items()}},
        progress=dict(Progress().to_json()),
    )
    arguments: dict[str, Json] = {}
    unstored: list[Json] = []
    if read is not None:
        unstored += read.objects
        for name, value in ({read.argument: read.hparams} if read.argument else read.hparams).items():
            try:
                arguments[name] = pack(value)[0]
            except CheckpointError:
                unstored.append(name)
        snapshot.objects["hparams"] = {"values": arguments, "unstored": unstored}
    storage.save(target, snapshot)
    return ImportedWeights(
        path=target,
        origin=read.note if read is not None else repr(given),
        tensors=len(names),
        arguments=tuple(arguments),
        unstored=tuple(map(str, unstored)),
        dropped=tuple(dropped),
    )
