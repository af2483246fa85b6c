"""The index of a directory of checkpoints, `index.json`: their order and purposes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from drivetrain.checkpoint.format.manifest import (
    FORMAT_VERSION,
    Snapshot,
    check_version,
    dump_metrics,
    load_metrics,
)
from drivetrain.checkpoint.format.strict_json import as_object, as_record, as_text, seal, unseal
from drivetrain.checkpoint.saving.config import CheckpointConfig, rankings
from drivetrain.checkpoint.storage.files import HashedReader, write_atomically
from drivetrain.checkpoint.storage.filesystem import LOCAL, DamagedCheckpointError, FileSystem, os_errors
from drivetrain.core.types import Json

INDEX = "index.json"

_FIELDS = {"order": int, "step": int, "epoch": int, "metrics": dict, "resume": list, "best": dict}
"""The fields of an entry, without its name."""

PURPOSE = "checkpoint"
"""The object in a checkpoint with a copy of its entry, for rebuilding a lost index. The copy is from the
time of writing: a purpose that was added later is only in the index."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One committed checkpoint.

    Attributes:
        name: The name of its directory beside the index, so that the run directory may be moved.
        order: The number of the save; the newest has the highest. Steps cannot serve for this: they go back
            when a run resumes from an earlier checkpoint.
        step: The number of steps made before it.
        epoch: The number of epochs made before it.
        metrics: The metrics that rank, as far as they were known.
        resume: The intervals that it is a rolling resume point of, such as "500 steps"; "" is a save at no
            interval, or at one that was not recorded.
        best: The metrics that it is among the best by, each with "min" or "max"; "" if that was not
            recorded.
    """

    name: str
    order: int
    step: int
    epoch: int
    metrics: dict[str, float] = field(default_factory=dict)
    resume: tuple[str, ...] = ("",)
    best: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        return {**asdict(self), "metrics": dump_metrics(self.metrics), "resume": list(self.resume)}


def write_index(directory: str, entries: Sequence[Entry], files: FileSystem = LOCAL) -> None:
    """Replace the index in one step.

    Raises:
        CheckpointError: The write failed; the old index is intact.
    """
    listed: list[Json] = [entry.to_json() for entry in entries]
    body: dict[str, Json] = {"format_version": FORMAT_VERSION, "checkpoints": listed}
    write_atomically(files.join(directory, INDEX), [seal(body, INDEX)], files)


def read_index(directory: str, files: FileSystem = LOCAL) -> list[Entry] | None:
    """Return the entries, oldest first, or None if there is no index.

    Raises:
        DamagedCheckpointError: The index is damaged.
        CheckpointError: The index has a newer format, or cannot be read.
    """
    path = files.join(directory, INDEX)
    with os_errors("read", path):
        if files.kind(path) is None:
            return None
    with HashedReader(path, files) as reader:
        body = unseal(reader.read_json(), repr(path))
    check_version(body.pop("format_version", None), repr(path))
    listed = as_record(body, {"checkpoints": list}, repr(path))["checkpoints"]
    entries = [_entry(value, path) for value in listed]
    if len({entry.name for entry in entries}) != len(entries):
        raise DamagedCheckpointError(f"{path!r} lists a checkpoint twice")
    return sorted(entries, key=lambda entry: entry.order)


def read_undamaged_index(directory: str, files: FileSystem) -> tuple[list[Entry], str]:
    """Return the entries, which are none if the index is damaged, and its fault or "".

    The manager repairs it when the run resumes.
    """
    try:
        return read_index(directory, files) or [], ""
    except DamagedCheckpointError as error:
        return [], str(error)


def _entry(value: Json, path: str) -> Entry:
    what = f"{path!r}: an entry"
    fields = dict(as_object(value, what))
    name = as_text(fields.pop("name", None), f"{what}: its name")
    if os.path.basename(name) != name or name.startswith(".") or "\\" in name or ":" in name or not name:
        raise DamagedCheckpointError(f"{what} has the name {name[:80]!r}, which leads out of the directory")
    return _with_fields(name, fields, f"{path!r}: the entry {name!r}")


def _with_fields(name: str, value: Json, what: str) -> Entry:
    fields = as_record(value, _FIELDS, what)
    resume = tuple(as_text(each, f"{what}: an interval") for each in fields["resume"])
    if not all(mode in ("min", "max", "") for mode in fields["best"].values()):
        raise DamagedCheckpointError(f"{what}: best must have 'min', 'max' or '' for each metric")
    metrics = load_metrics(fields["metrics"], f"{what}: metrics")
    return Entry(name, **{**fields, "metrics": metrics, "resume": resume})


def entry_from_snapshot(name: str, snapshot: Snapshot) -> Entry:
    """Return the entry of a checkpoint that is not in the index, from the checkpoint itself.

    A checkpoint that no manager saved counts as a resume point at the number of steps in its progress, and
    as older than all others.
    """
    purpose = snapshot.objects.get(PURPOSE)
    if isinstance(purpose, dict):
        return _with_fields(name, purpose, f"the checkpoint {name!r}")
    step, epoch = snapshot.progress.get("steps"), snapshot.progress.get("epoch")
    return Entry(name, 0, step if isinstance(step, int) else 0, epoch if isinstance(epoch, int) else 0)


def retain(entries: Sequence[Entry], policies: Sequence[CheckpointConfig]) -> tuple[list[Entry], list[Entry]]:
    """Apply the policies: each keeps its newest resume points and its best; the newest of all always stays.

    Resume points of an interval that no policy has, and saves at no interval, count for the first policy.

    Returns:
        The entries to keep, with their remaining purposes, and those to remove; both oldest first.
    """
    resume = _resume_points(entries, policies)
    best: dict[str, dict[str, str]] = {entry.name: {} for entry in entries}
    ranked = best_by_metric(entries, policies)
    for by, policy in rankings(policies).items():
        for entry in ranked[by][: policy.best_count]:
            best[entry.name] |= {by: policy.direction} if by in entry.best else entry.best
    flagged = [
        replace(
            entry,
            resume=tuple(each for each in entry.resume if each in resume[entry.name]),
            best=best[entry.name],
        )
        for entry in entries
    ]
    goes = [entry for entry in flagged[:-1] if not (entry.resume or entry.best)]
    return [entry for entry in flagged if entry.resume or entry.best or entry is flagged[-1]], goes


def _resume_points(entries: Sequence[Entry], policies: Sequence[CheckpointConfig]) -> dict[str, set[str]]:
    """Return the intervals that each entry stays a resume point of, by its name."""
    resume: dict[str, set[str]] = {entry.name: set() for entry in entries}
    known = {policy.interval_name for policy in policies}
    for policy in policies:
        own = set() if policy.interval_name is None else {policy.interval_name}
        if policy is policies[0]:
            own |= {each for entry in entries for each in entry.resume if each not in known}
        points = [entry for entry in entries if not own.isdisjoint(entry.resume)]
        for entry in points if policy.keep_last is None else points[max(0, len(points) - policy.keep_last) :]:
            resume[entry.name] |= own.intersection(entry.resume)
    return resume


def oldest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries, the first saved first."""
    return sorted(entries, key=lambda entry: (entry.order, entry.step))


def best_by_metric(entries: Sequence[Entry], policies: Sequence[CheckpointConfig]) -> dict[str, list[Entry]]:
    """Return the best checkpoints by each metric that ranks, the best first.

    A best checkpoint by a metric that no policy ranks by (another policy chose it) comes last in the first
    ranking, where it stays until one with a value takes its place.
    """
    found = {by: rank(entries, by, policy.direction) for by, policy in rankings(policies).items()}
    for ranked in list(found.values())[:1]:
        ranked += [each for each in entries if each.best and found.keys().isdisjoint(each.best)]
    return found


def rank(entries: Sequence[Entry], by: str, mode: str) -> list[Entry]:
    """Return the best checkpoints by a metric, the best first; of equal ones, the earlier first.

    Args:
        entries: The entries, oldest first.
        by: The metric.
        mode: "min" or "max".
    """
    sign = 1.0 if mode == "min" else -1.0

    def key(entry: Entry) -> tuple[bool, float]:
        value = entry.metrics.get(by, math.nan)
        return (True, 0.0) if math.isnan(value) else (False, sign * value)

    return sorted((entry for entry in entries if by in entry.best), key=key)
