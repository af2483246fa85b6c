"""The actions of `drivetrain checkpoint`, list, show, verify and export."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.format.records import TENSORS
from drivetrain.checkpoint.formats import FORMATS, export_folder
from drivetrain.checkpoint.inspection.description import describe
from drivetrain.checkpoint.inspection.listing import Listed, list_checkpoints
from drivetrain.checkpoint.saving.reading import Reader, open_checkpoint
from drivetrain.checkpoint.saving.run_directory import resolve
from drivetrain.checkpoint.storage.files import replacing
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError, os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import floating_dtype
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import WeightFiles
from drivetrain.checkpoint.weights.frozen import frozen_of
from drivetrain.checkpoint.weights.lazy_tensors import LazyTensors
from drivetrain.checkpoint.weights.torch_files import PICKLES
from drivetrain.cli.checkpoint.output import (
    Verdict,
    listing_json,
    print_description,
    print_listing,
    verdict_text,
)
from drivetrain.cli.printing import line, print_json
from drivetrain.core.errors import CheckpointError, ConfigError, plain

_FINE, _NOT_FINE = 0, 1
"""Exit codes."""


def _list(parsed: argparse.Namespace) -> int:
    listing = list_checkpoints(parsed.path)
    if parsed.json:
        print_json(listing_json(listing))
    else:
        print_listing(listing, time.time())
    return _FINE


def _show(parsed: argparse.Namespace) -> int:
    found = describe(open_checkpoint(resolve(parsed.path)))
    if parsed.json:
        print_json(asdict(found))
    else:
        print_description(found)
    return _FINE


def _verify(parsed: argparse.Namespace) -> int:
    targets, trouble = _targets(parsed.paths)
    verdicts: list[Verdict] = []
    say = line if not parsed.json else str
    for text in trouble:
        say(text)
    for each, is_checked in targets:
        verdicts.append(
            _check(each) if is_checked else Verdict(each.path, each.condition, each.bytes, each.trouble)
        )
        say(verdict_text(verdicts[-1]))
    is_good = not trouble and all(each.condition in ("good", "set aside", "unfinished") for each in verdicts)
    if parsed.json:
        print_json({"good": is_good, "trouble": trouble, "checkpoints": verdicts})
    return _FINE if is_good else _NOT_FINE


def _targets(paths: Sequence[str]) -> tuple[list[tuple[Listed, bool]], list[str]]:
    """Return the given checkpoints, whether to check each, and what is wrong with their indices."""
    found: dict[str, tuple[Listed, bool]] = {}
    trouble: list[str] = []
    for path in paths:
        listing = list_checkpoints(path)
        if not listing:
            raise CheckpointError(f"there are no checkpoints in {path!r}")
        trouble += [listing.trouble] if listing.trouble else []
        for each in listing.checkpoints:
            is_meant = each.path == listing.directory  # given by its path: checked whatever its name says
            is_checked = each.condition in ("committed", "damaged", "unreadable")
            found[each.path] = (each, is_meant or is_checked)
    return list(found.values()), trouble


def _check(listed: Listed) -> Verdict:
    try:
        reader = open_checkpoint(listed.path)
        with _bar(reader) as bar:
            reader.verify(bar.update)
    except DamagedCheckpointError as error:
        return Verdict(listed.path, "damaged", listed.bytes, str(error))
    except CheckpointError as error:  # too new, or no permission: go on with the others
        return Verdict(listed.path, "unreadable", listed.bytes, str(error))
    return Verdict(listed.path, "good", reader.size)


def _bar(reader: Reader) -> Any:
    """Return a progress bar that clears itself at the end; it draws only on a terminal."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # a monitor thread would outlive the bar

    return Bar(
        total=reader.size, desc=plain(reader.path), unit="B", unit_scale=True, leave=False, disable=None
    )


def _export(parsed: argparse.Namespace) -> int:
    if parsed.format in FORMATS:
        return _export_folder(parsed)
    if parsed.merge:
        raise ConfigError("--merge is for --format transformers: only there is the base known to load")
    _check_output(parsed)
    reader = open_checkpoint(resolve(parsed.path))
    weights = reader.snapshot(("model",), None).tensors["model"]
    if not weights:
        raise CheckpointError(f"{reader.path!r} holds no weights")
    frozen = frozen_of(reader)
    if parsed.format == "torch":
        written = [_write_torch(weights, parsed.output, parsed.dtype)]
    else:
        size = {} if parsed.max_shard_size is None else {"max_shard_size": parsed.max_shard_size}
        written = export_weights(weights, parsed.output, dtype=parsed.dtype, frozen=frozen, **size)
    left_out = len(frozen) if isinstance(frozen, dict) else 0
    found = {"checkpoint": reader.path, "tensors": len(weights), "files": written}
    text = f"not in there: {left_out} frozen parameters, which the checkpoint leaves out"
    return _print(parsed, {**found, "frozen": left_out}, *written, *([text] if left_out else []))


def _export_folder(parsed: argparse.Namespace) -> int:
    """Write a folder for another program; the integration of that name does it."""
    files = file_system(parsed.output)
    with os_errors("read", parsed.output):
        target = files.absolute(parsed.output)
        taken = files.kind(target) == "file" or (files.kind(target) == "directory" and files.entries(target))
    if taken and not parsed.force:
        raise ConfigError(f"{parsed.output!r} exists; --force replaces its files")
    size = {} if parsed.max_shard_size is None else {"max_shard_size": parsed.max_shard_size}
    path = resolve(parsed.path)
    options = {**size, **({"merge": True} if parsed.merge else {})}
    written = export_folder(parsed.format, path, parsed.output, dtype=parsed.dtype, **options)
    return _print(parsed, {"checkpoint": path, "format": parsed.format, "files": written}, *written)


def _write_torch(weights: Mapping[str, Tensor], output: str, dtype: str | None) -> str:
    """Write a file that `torch.load(output, weights_only=True)` reads, whole or not at all."""
    lazy = LazyTensors(weights, floating_dtype(dtype), f"the weights for {output!r}")
    state = {name: lazy.materialize(name) for name in weights}
    path = Path(output)
    with os_errors("write", output):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(str(path)) as hidden:
                torch.save(state, hidden)
        except RuntimeError as error:  # torch's own word for a full disk, among others
            raise CheckpointError(f"cannot write {output!r}: {error}") from error
    return output


def _check_output(parsed: argparse.Namespace) -> None:
    """Raise for options that contradict each other, or a file in the way, before reading anything."""
    output: str = parsed.output
    if parsed.format == "torch" and parsed.max_shard_size is not None:
        raise ConfigError("--max-shard-size needs --format safetensors; a torch state dict is one file")
    if parsed.format == "torch" and "://" in output:
        raise ConfigError(f"--format torch writes a local file, not {output!r}; copy it there afterwards")
    if parsed.format == "torch" and output.endswith(TENSORS):
        raise ConfigError(f"{output!r} is for safetensors; for --format torch, give one such as model.pt")
    if parsed.format == "safetensors" and output.endswith(PICKLES):
        raise ConfigError(f"{output!r} is a name for a torch file; add --format torch, or use {TENSORS!r}")
    if not parsed.force:
        _check_free(output, may_be_several=parsed.format == "safetensors")


def _check_free(output: str, may_be_several: bool) -> None:
    """Raise if the export would replace a file: the single one, or a shard or the index of a sharded one."""
    files = file_system(output)
    with os_errors("read", output):
        parent, single = files.split(files.absolute(output))
        taken = {single} if files.kind(files.absolute(output)) not in (None, "directory") else set()
        if may_be_several:
            names = WeightFiles(single)
            taken |= {
                name for name in files.entries(parent) if name == names.index or names.is_one_of_several(name)
            }
    if taken:  # a directory at the path raises in the export itself
        path = files.join(files.split(output)[0], min(taken, key=lambda name: (name != single, name)))
        raise ConfigError(f"{path!r} exists; --force replaces it")


def _print(parsed: argparse.Namespace, found: Any, *lines: str) -> int:
    """Print JSON or lines, whichever is asked for."""
    if parsed.json:
        print_json(found)
    else:
        for each in lines:
            line(each)
    return _FINE


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
}
"""The function for each action; it returns the exit code."""
