"""The output of `drivetrain checkpoint`: tables for people, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from drivetrain.checkpoint.inspection.description import CheckpointTotals, Description
from drivetrain.checkpoint.inspection.listing import Listed, Listing
from drivetrain.cli.printing import line, section, shortened, span, table
from drivetrain.core.messages import sized
from drivetrain.core.types import Json

_NO_ENTRY: Mapping[str, Json] = dict.fromkeys(("order", "step", "epoch", "metrics", "resume", "best"))

_SHOWN = ("order", "resume", "best")
"""The printed fields of a checkpoint's purpose; its progress and metrics have the rest."""


@dataclass(frozen=True)
class Verdict:
    """The result of `verify` for one checkpoint: "good" or a `Condition`; its size; the trouble."""

    path: str
    condition: str
    bytes: int | None = None
    trouble: str | None = None


def listing_json(listing: Listing) -> dict[str, Any]:
    return {
        "directory": listing.directory,
        "trouble": listing.trouble or None,
        "checkpoints": [_listed_json(each) for each in listing.checkpoints],
    }


def _listed_json(each: Listed) -> dict[str, Any]:
    entry = each.entry.to_json() if each.entry else _NO_ENTRY
    saved_at = None if each.saved_at is None else datetime.fromtimestamp(each.saved_at, UTC)
    return {
        **entry,
        "name": each.name,
        "path": each.path,
        "condition": each.condition,
        "bytes": each.bytes,
        "saved_at": saved_at and saved_at.isoformat(timespec="seconds"),
        "trouble": each.trouble or None,
    }


def print_listing(listing: Listing, now: float) -> None:
    """Print a listing."""
    names = {name for each in listing.checkpoints if each.entry for name in each.entry.metrics}
    head = ("name", "order", "step", "epoch", "kept for", "metric", "size", "age")
    table(
        head, [_row(each, now, len(names) == 1) for each in listing.checkpoints], numbers=(1, 2, 3, 5, 6, 7)
    )
    if len(names) == 1:
        line()
        line(f"metric: {names.pop()}")
    if not listing.checkpoints:
        line(f"no checkpoints in {listing.directory}")
    section("what is wrong", [(each.name, each.trouble) for each in listing.checkpoints if each.trouble])
    section("the index is damaged", [(listing.directory, listing.trouble)] if listing.trouble else [])


def _row(each: Listed, now: float, is_one_metric: bool) -> tuple[str, ...]:
    size = "" if each.bytes is None else sized(each.bytes)
    age = "" if each.saved_at is None else span(now - each.saved_at)
    entry = each.entry
    if entry is None:
        return each.name, "", "", "", f"[{each.condition}]", "", size, age
    purposes = ["resume"] * bool(entry.resume)
    if entry.best:
        purposes.append("best" if is_one_metric else f"best({', '.join(entry.best)})")
    kept = " ".join(purposes) or "newest"
    metrics = ", ".join(
        f"{value:.4g}" if is_one_metric else f"{name} {value:.4g}" for name, value in entry.metrics.items()
    )
    return (
        each.name,
        str(entry.order),
        str(entry.step),
        str(entry.epoch),
        kept if each.condition == "committed" else f"[{each.condition}]",
        metrics,
        size,
        age,
    )


def print_description(found: Description) -> None:
    """Print a checkpoint's description."""
    line(found.path)
    saved_by = {**found.saved_by, "format": found.format_version}
    hparams = {**found.hparams, **dict.fromkeys(found.unstored, "(not stored: a file cannot hold it)")}
    titled: dict[str, Mapping[str, Any]] = {
        "saved by": saved_by,
        "saved as": {name: found.purpose[name] for name in _SHOWN if name in found.purpose},
        "progress": found.progress,
        "metrics": found.metrics,
        "hparams": hparams,
    }
    for title, values in titled.items():
        section(title, [(name, _text(value)) for name, value in values.items()])
    for name, optimizer in found.optimizers.items():
        groups = [
            (f"group {index}", ", ".join(f"{key} {_text(value)}" for key, value in group.items()))
            for index, group in enumerate(optimizer.groups)
        ]
        section(f"optimizer {name}: {optimizer.optimizer}", groups)
    section("files", [(name, sized(size)) for name, size in found.files.items()])
    section("assets", [(name, sized(size)) for name, size in found.assets.items()])
    if found.groups:
        line()
        head = ("tensors", "number", "elements", "size", "dtypes")
        rows = [_group_row(name, each) for name, each in found.groups.items()]
        table(head, rows, numbers=(1, 2, 3))


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shortened(value)


def _group_row(name: str, group: CheckpointTotals) -> tuple[str, ...]:
    if len(group.dtypes) == 1:
        dtypes = next(iter(group.dtypes))
    else:
        dtypes = ", ".join(f"{dtype} {elements:,}" for dtype, elements in group.dtypes.items())
    return name, f"{group.tensors:,}", f"{group.elements:,}", sized(group.bytes), dtypes


def verdict_text(verdict: Verdict) -> str:
    if verdict.condition == "good":
        return f"{verdict.path}: good, {sized(verdict.bytes or 0)}"
    if verdict.condition in ("set aside", "unfinished"):
        return f"{verdict.path}: {verdict.trouble}; not checked"
    return f"{verdict.path}: {verdict.condition.upper()}: {verdict.trouble}"
