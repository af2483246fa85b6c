"""`drivetrain checkpoint import`: make a checkpoint of weights that another program saved."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tree import pack
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.load import is_torch_file, load_weights, torch_weights
from drivetrain.checkpoint.weights.rename import Rename, renamed
from drivetrain.cli.printing import line, print_json
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.progress import Progress
from drivetrain.core.types import Json

ABOUT = (
    "Takes the weights of a Lightning or Composer checkpoint, or of a state dict, and Lightning's"
    " hyper-parameters that are plain values. Runs no code from the file. Reads no optimizer states."
)


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the arguments by a parser's `add_argument`."""
    add("source", metavar="FILE", help="the file, such as last.ckpt or model.pt; also an address")
    add("output", metavar="OUTPUT", help="the checkpoint to write, a directory; also an address")
    add(
        "--rename",
        metavar="PATTERN=NEW",
        action="append",
        help="turn the file's names into the task's: replace what matches the regular expression by NEW, such"
        " as '^=net.'; may be repeated",
    )


def run(parsed: argparse.Namespace) -> int:
    """Import, print a summary, and return the exit code."""
    found = import_weights(parsed.source, parsed.output, rename=_rename(parsed.rename or ()))
    if parsed.json:
        print_json(found)
        return 0
    parts = [f"{found['path']}: {found['tensors']} tensors"]
    if found["arguments"]:
        parts.append(f"the arguments {', '.join(found['arguments'])}")
    if found["unstored"]:
        parts.append(f"without the arguments {', '.join(found['unstored'])}, which no file can hold")
    line(f"{', '.join(parts)}; from {found['origin']}")
    return 0


def _rename(words: Sequence[str]) -> dict[str, str]:
    rename: dict[str, str] = {}
    for given in words:
        pattern, sign, replacement = given.rpartition("=")  # a pattern may contain "=", a name cannot
        if not sign or not pattern:
            raise ConfigError(f"--rename takes PATTERN=NEW, such as '^=net.', not {given!r}")
        rename[pattern] = replacement
    return rename


def import_weights(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, rename: Rename | None = None
) -> dict[str, Any]:
    """Write a checkpoint from a file of weights, such as a checkpoint of Lightning or Composer.

    Nothing that a pickle names is run or imported. The checkpoint can be loaded (`task.load_weights`,
    `Task.from_checkpoint`), but no run can resume from it: no optimizer state is read.

    Args:
        source: A path that `checkpoint.load_weights` reads.
        path: The checkpoint to write; also an address.
        rename: The rule from source names to the task's, as for `task.load_weights`.

    Returns:
        The new checkpoint's "path", the number of its "tensors", and the "origin": what was read. Also lists
        of names: the constructor's "arguments", the "unstored" ones that no file can hold, and the "dropped".

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
    origin = read.note if read is not None else repr(given)
    counted = {"path": target, "origin": origin, "tensors": len(names)}
    return {**counted, "arguments": [*arguments], "unstored": unstored, "dropped": dropped}
