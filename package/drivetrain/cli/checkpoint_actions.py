"""What `drivetrain checkpoint` does: lists, shows, verifies, exports, compares, imports."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from drivetrain.checkpoint.compare import compare
from drivetrain.checkpoint.description import describe, open_checkpoint
from drivetrain.checkpoint.export import export_weights
from drivetrain.checkpoint.filesystem import DamagedCheckpointError, os_errors
from drivetrain.checkpoint.inspection import Listed, list_checkpoints
from drivetrain.checkpoint.locate import resolve
from drivetrain.checkpoint.places import file_system
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.records import TENSORS
from drivetrain.checkpoint.torch_file import export_torch
from drivetrain.checkpoint.torch_weights import PICKLES
from drivetrain.checkpoint.weight_files import WeightFiles
from drivetrain.cli.checkpoint_output import (
    Verdict,
    comparison_json,
    listing_json,
    print_comparison,
    print_description,
    print_listing,
    print_tensors,
    tensors_json,
    verdict_text,
)
from drivetrain.cli.printing import line, plain, print_json
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.foreign import ImportedCheckpoint, ImportedWeights, import_deepspeed, import_weights

_FINE, _NOT_FINE = 0, 1
"""Exit codes; the latter also of `diff` when something differs."""

_SHOWN = 40
"""Differences after which the rest is counted; with --all, or as JSON, there is no end."""


def _list(parsed: argparse.Namespace) -> int:
    listing = list_checkpoints(parsed.path)
    if parsed.json:
        print_json(listing_json(listing))
    else:
        print_listing(listing, time.time())
    return _FINE


def _show(parsed: argparse.Namespace) -> int:
    reader = open_checkpoint(resolve(parsed.path))
    found = describe(reader)
    tensors = reader.manifest.tensors if parsed.tensors else {}
    if parsed.json:
        print_json({**found.to_json(), **({"tensors": tensors_json(reader)} if parsed.tensors else {})})
    else:
        print_description(found)
        print_tensors(tensors)
    return _FINE


def _verify(parsed: argparse.Namespace) -> int:
    targets, trouble = _targets(parsed.paths)
    verdicts: list[Verdict] = []
    for text in trouble if not parsed.json else ():
        line(text)
    for each, is_checked in targets:
        verdicts.append(
            _check(each) if is_checked else Verdict(each.path, each.condition, each.bytes, each.trouble)
        )
        if not parsed.json:
            line(verdict_text(verdicts[-1]))
    is_good = not trouble and all(each.condition in ("good", "set aside", "unfinished") for each in verdicts)
    if parsed.json:
        listed = [each._asdict() for each in verdicts]
        print_json({"good": is_good, "trouble": trouble, "checkpoints": listed})
    return _FINE if is_good else _NOT_FINE


def _targets(paths: Sequence[str]) -> tuple[list[tuple[Listed, bool]], list[str]]:
    """The checkpoints that are meant, whether each is to be checked, and what is wrong with their indices."""
    found: dict[str, tuple[Listed, bool]] = {}
    trouble: list[str] = []
    for path in paths:
        listing = list_checkpoints(path)
        if not listing:
            raise CheckpointError(f"there are no checkpoints in {path!r}")
        trouble += [listing.trouble] if listing.trouble else []
        for each in listing.checkpoints:
            is_meant = each.path == listing.directory  # and so is checked whatever it is called
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
    except CheckpointError as error:  # too new, or no permission: the others are checked all the same
        return Verdict(listed.path, "unreadable", listed.bytes, str(error))
    return Verdict(listed.path, "good", sum(each.bytes for each in reader.manifest.files.values()))


def _bar(reader: Reader) -> Any:
    """Return a progress bar, which is gone at the end, on a terminal; elsewhere it draws nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # the thread that this starts would outlive the bar

    total = sum(each.bytes for each in reader.manifest.files.values())
    return Bar(total=total, desc=plain(reader.path), unit="B", unit_scale=True, leave=False, disable=None)


def _export(parsed: argparse.Namespace) -> int:
    _check_output(parsed)
    reader = open_checkpoint(resolve(parsed.path))
    weights = reader.snapshot((parsed.group,), None).tensors[parsed.group]
    if not weights:
        raise CheckpointError(f"the group {parsed.group!r} of {reader.path!r} holds no tensors")
    if parsed.format == "torch":
        written = [export_torch(weights, parsed.output, dtype=parsed.dtype)]
    else:
        size = {} if parsed.max_shard_size is None else {"max_shard_size": parsed.max_shard_size}
        written = export_weights(weights, parsed.output, dtype=parsed.dtype, **size)
    if parsed.json:
        found = {"checkpoint": reader.path, "group": parsed.group, "tensors": len(weights), "files": written}
        print_json(found)
    else:
        for each in written:
            line(each)
    return _FINE


def _check_output(parsed: argparse.Namespace) -> None:
    """Refuse what could surprise, before anything is read."""
    output: str = parsed.output
    if parsed.format == "torch" and parsed.max_shard_size is not None:
        raise ConfigError("--max-shard-size is for safetensors; a torch state dict is one file")
    if parsed.format == "torch" and output.endswith(TENSORS):
        raise ConfigError(
            f"{output!r} is a name for safetensors; with --format torch, give a name like model.pt"
        )
    if parsed.format == "safetensors" and output.endswith(PICKLES):
        raise ConfigError(f"{output!r} is a name for a file of torch; add --format torch, or use {TENSORS!r}")
    if not parsed.force:
        _check_free(output, may_be_several=parsed.format == "safetensors")


def _check_free(output: str, may_be_several: bool) -> None:
    """Refuse to replace a file, or any of the files and the index of an export in several."""
    files = file_system(output)
    with os_errors("read", output):
        parent, single = files.split(files.absolute(output))
        taken = {single} if files.kind(files.absolute(output)) not in (None, "directory") else set()
        if may_be_several:
            names = WeightFiles(single)
            taken |= {
                name for name in files.entries(parent) if name == names.index or names.is_one_of_several(name)
            }
    if taken:  # of a directory at the path the export itself says what is wrong
        path = files.join(files.split(output)[0], min(taken, key=lambda name: (name != single, name)))
        raise ConfigError(f"{path!r} is there already; --force replaces it")


def _diff(parsed: argparse.Namespace) -> int:
    found = compare(resolve(parsed.first), resolve(parsed.second), values=parsed.values)
    if parsed.json:
        print_json(comparison_json(found))
    else:
        print_comparison(found, None if parsed.all else _SHOWN)
    return _FINE if found.is_same else _NOT_FINE


def _import(parsed: argparse.Namespace) -> int:
    return _tell(parsed, import_weights(parsed.source, parsed.output, rename=_rename(parsed)))


def _import_deepspeed(parsed: argparse.Namespace) -> int:
    rename = _rename(parsed)
    found = import_deepspeed(
        parsed.folder, parsed.output, tag=parsed.tag, rename=rename, weights_only=parsed.weights_only
    )
    return _tell(parsed, found)


def _rename(parsed: argparse.Namespace) -> dict[str, str]:
    rename: dict[str, str] = {}
    for given in parsed.rename or ():
        pattern, sign, replacement = given.rpartition("=")  # a pattern may have one in it, a name has none
        if not sign or not pattern:
            raise ConfigError(f"--rename takes PATTERN=REPLACEMENT, such as '^=net.', not {given!r}")
        rename[pattern] = replacement
    return rename


def _tell(parsed: argparse.Namespace, found: ImportedCheckpoint | ImportedWeights) -> int:
    if parsed.json:
        print_json(asdict(found))
    else:
        line(str(found))
    return _FINE


ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "export": _export,
    "diff": _diff,
    "import": _import,
    "import-deepspeed": _import_deepspeed,
}
"""What runs for each action; returns the exit code."""
