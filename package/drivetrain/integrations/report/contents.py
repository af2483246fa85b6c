"""The contents of the report as JSON: runs, curves, settings, time, messages, media and searches."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drivetrain.cli.run_record import Curve, RunRecord, best_of, differences
from drivetrain.core.direction import direction_of
from drivetrain.core.errors import plain
from drivetrain.core.types import Json
from drivetrain.integrations.report.media import logged_media
from drivetrain.run.ledger_report import KINDS

BINS = 800
"""The most bins on an axis; of the points of one bin the least and the largest are drawn."""

_FEWEST_BINS = 60
_ALL_BINS = 400_000
"""The bins of all curves together, which keeps the page of a sweep small."""

_GROUPS = {
    "train": "train",
    "validation": "validation",
    "test": "test",
    "lr": "rates",
    "throughput": "time",
    "timing": "time",
}
"""The section of a curve by the first part of its name; other first parts are sections of their own."""

_ALIVE = 120.0
"""A run without an end counts as running until its last line is so many seconds old."""

_HIDDEN = re.compile(r"run\.|trainer\.(run_dir|run_name|callbacks|loggers|progress_bar)\b")
"""Settings that say where a run was, and nothing about what it trained."""


def run_contents(run: RunRecord, runs: int) -> dict[str, Any]:
    """Return what the report shows of one run.

    Args:
        run: The run.
        runs: The number of runs in the report, which share the bins.
    """
    curves = run.read_curves()
    bins = min(BINS, max(_FEWEST_BINS, _ALL_BINS // max(1, runs * len(curves))))
    ledger, attempts = run.ledger, run.ledger.attempts
    best = best_of(curves, run.settings)
    return {
        "name": plain(run.name),
        "path": plain(str(ledger.directory)),
        "state": _state(attempts[-1].ended, attempts[-1].heard),
        "began": attempts[0].began,
        "steps": ledger.steps,
        "seconds": ledger.wall,
        "attempts": len(attempts),
        "goodput": ledger.goodput,
        "time": [round(ledger.seconds[kind], 3) for kind in KINDS],
        "metric": best and best[0],
        "messages": [
            [number, kind, plain(text)]
            for number, attempt in enumerate(attempts, 1)
            for kind, text in (
                *(("warning", each) for each in attempt.warnings),
                *([(attempt.ended or "error", attempt.error)] if attempt.error is not None else []),
            )
        ],
        "curves": {plain(name): drawn(curve, bins) for name, curve in curves.items()},
        "media": logged_media(ledger.directory),
    }


def page_contents(
    records: Sequence[RunRecord],
    runs: Sequence[dict[str, Any]],
    searches: Sequence[dict[str, Any]],
    media_left_out: int,
    refresh: float | None,
) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        records: The runs.
        runs: What `run_contents` has returned for each.
        searches: The searches whose trials these runs are.
        media_left_out: The number of pictures, tables, texts and sounds that had no room.
        refresh: Seconds after which the page loads itself again; None never.
    """
    names = dict.fromkeys(name for run in runs for name in run["curves"])
    metrics = [run["metric"] for run in runs if run["metric"]]
    objectives = [each["objectives"][0] for each in searches if each.get("objectives")]
    differing = differences(records) if len(records) > 1 else _settings_of(records)
    return {
        "title": title_of(records),
        "written": time.time(),
        "refresh": refresh,
        "runs": [
            {key: each for key, each in run.items() if key not in ("curves", "media", "metric")}
            for run in runs
        ],
        "metric": next(iter(objectives + sorted(metrics, key=metrics.count, reverse=True)), None),
        "kinds": KINDS,
        "settings": [
            {"name": plain(name), "minor": bool(_HIDDEN.match(name)), "of": [_written(each) for each in row]}
            for name, row in differing.items()
        ],
        "unknown": [plain(record.name) for record in records if not record.settings],
        "curves": [
            {
                "name": name,
                "group": _group(name),
                "less": direction_of(name) != "max",
                "of": [run["curves"].get(name) for run in runs],
            }
            for name in sorted(names, key=_order)
        ],
        "media": [{"run": index, **each} for index, run in enumerate(runs) for each in run["media"]],
        "mediaLeftOut": media_left_out,
        "searches": [_search(each, records) for each in searches],
    }


def title_of(runs: Sequence[RunRecord]) -> str:
    """Return "200 runs of runs/sweep/"; of one run its name."""
    if len(runs) == 1:
        return plain(runs[0].name)
    try:
        shared = os.path.commonpath([each.ledger.directory.parent for each in runs])
    except ValueError:  # a relative path and an absolute one
        shared = ""
    return f"{len(runs)} runs" + (f" of {plain(shared)}/" if shared not in ("", ".", os.sep) else "")


def drawn(curve: Curve, bins: int = BINS) -> dict[str, Json]:
    """Return what is drawn of a curve: of each bin's points the least and the largest, and gaps.

    Returns:
        The differences between successive steps as "x", and the values as "y", None for one that is not
        finite. Of all points: the "last", the "least" and "most" with their steps, and the number of "gaps".
    """
    steps, values = np.asarray(curve[0], dtype=np.float64), np.asarray(curve[1], dtype=np.float64)
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    extent: dict[str, Json] = {
        name: [float(values[at]), float(steps[at])] if finite.any() else None
        for name, at in (("least", low.argmin()), ("most", high.argmax()))
    }
    if len(steps) > 2 * bins:
        starts = np.arange(bins) * len(steps) // bins
        chosen = {0, len(steps) - 1}
        for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
            chosen |= {int(start + low[start:end].argmin()), int(start + high[start:end].argmax())}
            if not finite[start:end].all():
                chosen.add(int(start + finite[start:end].argmin()))
        kept = np.array(sorted(chosen))
        steps, values = steps[kept], values[kept]
    return {
        "x": [int(each) if each.is_integer() else each for each in np.diff(steps, prepend=0.0).tolist()],
        "y": [float(f"{each:.6g}") if math.isfinite(each) else None for each in values.tolist()],
        "last": _number(curve[1][-1]),
        **extent,
        "gaps": int((~finite).sum()),
    }


def _number(value: float) -> Json:
    return value if math.isfinite(value) else str(value)


def _state(ended: str | None, heard: float) -> str:
    if ended is not None:
        return plain(ended)
    return "running" if time.time() - heard < _ALIVE else "silent"


def _group(name: str) -> str:
    first, slash, _ = name.partition("/")
    return _GROUPS.get(first, first if slash else "other")


def _order(name: str) -> tuple[int, str]:
    groups = ["train", "validation", "test", "other", "rates"]
    found = _group(name)
    return groups.index(found) if found in groups else len(groups), name if found not in groups else ""


def _settings_of(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    return {name: [str(each)] for record in records for name, each in record.settings.items()}


def _written(value: str) -> str:
    """Return a setting as people write it: 1e-05 is 1e-5."""
    return plain(re.sub(r"(?<=\d)e([-+])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", value))


def _search(found: Mapping[str, Any], records: Sequence[RunRecord]) -> dict[str, Any]:
    numbers = {record.ledger.directory.resolve(): index for index, record in enumerate(records)}
    trials = [{**each, "run": numbers.get(Path(each["run"]).resolve())} for each in found.get("trials", ())]
    return {**found, "trials": trials}
