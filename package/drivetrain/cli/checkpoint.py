"""`drivetrain checkpoint`: looks at checkpoints, checks them, takes weights out of them, compares two."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.checkpoint import DamagedCheckpointError, export_weights, resolve, unpack, verify
from drivetrain.checkpoint.compare import Comparison, TensorDifference, compare, open_checkpoint
from drivetrain.checkpoint.format import Manifest
from drivetrain.checkpoint.inspection import Listed, list_checkpoints
from drivetrain.checkpoint.reading import Reader
from drivetrain.checkpoint.tensors import DTYPES
from drivetrain.checkpoint.torch_file import export_torch
from drivetrain.cli.printing import print_json, sized, table
from drivetrain.errors import CheckpointError, ConfigError

DIFFERENT = 1
"""The exit code of `diff` when something differs, and of `verify` when something is damaged."""

_SHOWN = 40
"""Lines of a list after which the rest is counted; with --all, or as JSON, there is no end."""


def run(words: Sequence[str]) -> int:
    """Run `drivetrain checkpoint` with the words behind it, and return its exit code."""
    parsed = _parser().parse_args(words)
    command: Callable[[argparse.Namespace], int] = parsed.run
    return command(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain checkpoint",
        description="Look at checkpoints, check them, take weights out of them, compare two.",
        epilog="PATH is a checkpoint, a run directory (its newest good checkpoint), or an address such as"
        " s3://bucket/run.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, run: Callable[[argparse.Namespace], int], purpose: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=purpose, description=purpose.capitalize() + ".", allow_abbrev=False
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--debug", action="store_true", help="show the traceback of every error")
        return command

    command = add("list", _list, "list the checkpoints of a run directory, oldest first")
    command.add_argument("path", metavar="PATH", help="a run directory or a directory of checkpoints")
    command = add("show", _show, "say what a checkpoint is")
    command.add_argument("path", metavar="PATH")
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    command = add("verify", _verify, "check every byte; exit code 1 if any is damaged")
    command.add_argument("paths", metavar="PATH", nargs="+", help="checkpoints; of a run directory, all")
    command = add("export", _export, "write the weights as a plain file")
    command.add_argument("path", metavar="PATH")
    command.add_argument("output", metavar="OUTPUT", help="the file to write")
    command.add_argument("--format", choices=("safetensors", "torch"), default="safetensors")
    command.add_argument("--dtype", metavar="DTYPE", help="convert floating-point tensors: bf16, float32...")
    command.add_argument("--max-shard-size", metavar="SIZE", help='split above this size, such as "5 GB"')
    command.add_argument("--force", action="store_true", help="overwrite the file if it is there")
    command = add("diff", _diff, "say what differs; exit code 1 if anything does")
    command.add_argument("first", metavar="A")
    command.add_argument("second", metavar="B")
    command.add_argument("--values", action="store_true", help="measure how far tensors are apart")
    command.add_argument("--all", action="store_true", help="list every difference")
    return parser


def _list(parsed: argparse.Namespace) -> int:
    listed = list_checkpoints(parsed.path)
    if parsed.json:
        print_json({"checkpoints": [_listed_json(each) for each in listed]})
        return 0
    rows = []
    for each in listed:
        entry = each.entry
        if entry is None or each.trouble:
            rows.append((os.path.basename(each.path), "", "", "", each.trouble))
            continue
        purposes = [name for name, has in (("resume", entry.resume), ("keeper", entry.keeper)) if has]
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in entry.metrics.items())
        rows.append(
            (entry.name, str(entry.update), str(entry.epoch), ", ".join(purposes) or "newest", metrics)
        )
    table(("name", "update", "epoch", "kept for", "metric"), rows)
    if not listed:
        print(f"no checkpoints in {parsed.path}")
    return 0


def _listed_json(each: Listed) -> dict[str, Any]:
    entry = each.entry.to_json() if each.entry else None
    return {"path": each.path, "entry": entry, "trouble": each.trouble or None}


def _show(parsed: argparse.Namespace) -> int:
    reader = open_checkpoint(resolve(parsed.path))
    found = _description(reader)
    if parsed.json:
        if parsed.tensors:
            found["tensors"] = reader.manifest.to_json()["tensors"]
        print_json(found)
        return 0
    print(found["path"])
    for title in ("saved_by", "progress", "metrics", "hparams"):
        _section(title.replace("_", " "), [(name, str(value)) for name, value in found[title].items()])
    for name, groups in found["optimizers"].items():
        rows = [
            (f"group {index}", ", ".join(f"{key} {value}" for key, value in group.items()))
            for index, group in enumerate(groups)
        ]
        _section(f"optimizer {name}", rows)
    _section("files", [(name, sized(size)) for name, size in found["files"].items()])
    groups = [
        (
            group,
            f"{each['count']} tensors",
            f"{each['elements']:,} numbers",
            sized(each["bytes"]),
            ", ".join(each["dtypes"]),
        )
        for group, each in found["groups"].items()
    ]
    _section("tensors", groups)
    for group, records in reader.manifest.tensors.items() if parsed.tensors else ():
        lines = [
            (name, f"{record.dtype}{list(record.shape)}", _pieces(len(record.pieces)))
            for name, record in records.items()
        ]
        _section(group, lines)
    return 0


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(f"\n{title}")
        table((), rows)


def _pieces(count: int) -> str:
    return "" if count == 1 else f"in {count} pieces"


def _description(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    hparams = reader.object("hparams") if "hparams" in manifest.objects() else None
    values = hparams.get("values") if isinstance(hparams, dict) else None
    unstored = hparams.get("unstored") if isinstance(hparams, dict) else None
    return {
        "path": reader.path,
        "format_version": manifest.format_version,
        "saved_by": dict(manifest.saved_by),
        "progress": dict(manifest.progress),
        "metrics": dict(manifest.metrics),
        "hparams": {
            **(values if isinstance(values, dict) else {}),
            **{str(name): "(not stored)" for name in (unstored if isinstance(unstored, list) else ())},
        },
        "optimizers": _optimizers(reader),
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "groups": {group: _group(manifest, group) for group in manifest.tensors},
    }


def _group(manifest: Manifest, group: str) -> dict[str, Any]:
    records = manifest.tensors[group].values()
    sizes = [_elements(record.shape) for record in records]
    return {
        "count": len(sizes),
        "elements": sum(sizes),
        "dtypes": sorted({record.dtype for record in records}),
        "bytes": sum(
            size * DTYPES[record.dtype].itemsize for size, record in zip(sizes, records, strict=True)
        ),
    }


def _elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _optimizers(reader: Reader) -> dict[str, list[dict[str, Any]]]:
    """The settings of each optimizer's groups, without the names of their parameters."""
    state = reader.object("state") if "state" in reader.manifest.objects() else None
    stored = state.get("optimizers") if isinstance(state, dict) else None
    found: dict[str, list[dict[str, Any]]] = {}
    for name, meta in (stored if isinstance(stored, dict) else {}).items():
        groups = meta.get("groups") if isinstance(meta, dict) else None
        found[name] = [
            {
                "parameters" if key == "parameters" else key: len(value)
                if key == "parameters" and isinstance(value, list)
                else unpack(value, {})
                for key, value in group.items()
            }
            for group in (groups if isinstance(groups, list) else ())
            if isinstance(group, dict)
        ]
    return found


def _verify(parsed: argparse.Namespace) -> int:
    results: list[dict[str, Any]] = []
    for path in _each(parsed.paths):
        try:
            manifest = verify(path)
        except DamagedCheckpointError as error:
            results.append({"path": path, "good": False, "trouble": str(error)})
        else:
            size = sum(record.bytes for record in manifest.files.values())
            results.append({"path": path, "good": True, "bytes": size})
        if not parsed.json:
            last = results[-1]
            outcome = f"good, {sized(last['bytes'])}" if last["good"] else f"DAMAGED: {last['trouble']}"
            print(f"{path}: {outcome}")
    if parsed.json:
        print_json({"checkpoints": results})
    return 0 if all(each["good"] for each in results) else DIFFERENT


def _each(paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        listed = list_checkpoints(path)
        if not listed:
            raise CheckpointError(f"there are no checkpoints in {path!r}")
        found += [each.path for each in listed]
    return found


def _export(parsed: argparse.Namespace) -> int:
    reader = open_checkpoint(resolve(parsed.path))
    if os.path.exists(parsed.output) and not parsed.force:
        raise ConfigError(f"{parsed.output!r} is there already; --force overwrites it")
    if parsed.format == "torch" and parsed.max_shard_size is not None:
        raise ConfigError("--max-shard-size is for safetensors; a torch state dict is one file")
    weights = reader.snapshot(("model",), None).tensors["model"]
    if parsed.format == "torch":
        export_torch(weights, parsed.output, dtype=parsed.dtype)
        written = [parsed.output]
    else:
        sizes = {} if parsed.max_shard_size is None else {"max_shard_size": parsed.max_shard_size}
        written = [str(each) for each in export_weights(weights, parsed.output, dtype=parsed.dtype, **sizes)]
    if parsed.json:
        print_json({"checkpoint": reader.path, "files": written, "tensors": len(weights)})
    else:
        for each in written:
            print(each)
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    first, second = resolve(parsed.first), resolve(parsed.second)
    found = compare(first, second, values=parsed.values)
    if parsed.json:
        print_json(
            {
                "first": first,
                "second": second,
                "same_tensors": found.same,
                "tensors": [dataclasses.asdict(each) for each in found.tensors],
                "values": {place: list(pair) for place, pair in found.values.items()},
            }
        )
    else:
        _print_comparison(found, None if parsed.all else _SHOWN)
    return DIFFERENT if found else 0


def _print_comparison(found: Comparison, limit: int | None) -> None:
    if not found:
        print(f"the same: {found.same} tensors, and everything else")
        return
    print(f"{found.same} tensors are the same, {len(found.tensors)} differ")
    rows = [(f"{each.group}/{each.name}", _kind(each), _apart(each)) for each in found.tensors[:limit]]
    rows += [
        (place, f"{first!r} became {second!r}", "")
        for place, (first, second) in list(found.values.items())[:limit]
    ]
    table((), rows)
    hidden = len(found.tensors) + len(found.values) - len(rows)
    if hidden:
        print(f"... and {hidden} more; --all lists them")


def _kind(different: TensorDifference) -> str:
    if different.first is None:
        return f"only in the second: {different.second}"
    if different.second is None:
        return f"only in the first: {different.first}"
    if different.first == different.second:
        return f"other values, {different.first}"
    return f"{different.first} became {different.second}"


def _apart(different: TensorDifference) -> str:
    if different.largest is None:
        return ""
    return f"at most {different.largest:.3g} apart, {different.relative:.3g} relative"
