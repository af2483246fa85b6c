"""The report of runs: one HTML file with their curves, by plotly, that needs no network."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from drivetrain.cli.printing import span
from drivetrain.cli.run_record import Curve, RunRecord, differences, unknown_settings
from drivetrain.core.errors import MissingDependencyError
from drivetrain.run.ledger_report import KINDS

PIXELS = 800
"""The places on an axis; of the points of one place the least and the largest are drawn."""


def make_report(runs: Sequence[RunRecord]) -> str:
    """Return the report, in HTML."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingDependencyError("plotly", "report", "drivetrain runs report") from None
    parts = {
        "title": html.escape(", ".join(run.name for run in runs)),
        **_tables(runs),
        "messages": _messages(runs),
        "unknown": html.escape(unknown_settings(runs)),
        # In a script "<" could begin its end.
        "data": json.dumps(_data(runs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "plotly": get_plotlyjs(),
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    pieces = page.split("@@")  # every second one is the name of a part
    return "".join(parts[each] if number % 2 else each for number, each in enumerate(pieces))


def _data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return what the page draws: the curves and where the time went."""
    values = dict.fromkeys(name for run in runs for name in run.curves)
    return {
        "runs": [run.name for run in runs],
        "curves": [
            {"name": name, "of": [_drawn(run.curves.get(name, ([], []))) for run in runs]} for name in values
        ],
        "time": {
            "kinds": KINDS,
            "of": [
                {"label": f"{run.name}, attempt {number}" if len(run.ledger.attempts) > 1 else run.name,
                 "waited": attempt.waited, "seconds": attempt.seconds}
                for run in runs
                for number, attempt in enumerate(run.ledger.attempts, 1)
            ],
        },
    }  # fmt: skip


def _tables(runs: Sequence[RunRecord]) -> dict[str, str]:
    values = dict.fromkeys(name for run in runs for name in run.curves)
    return {
        "runs": _table(
            ("run", "steps", "attempts", "wall time", "goodput", "ended"),
            [
                (
                    run.name,
                    f"{run.ledger.steps:,}",
                    f"{len(run.ledger.attempts)}",
                    span(run.ledger.wall),
                    f"{run.ledger.goodput:.1%}",
                    run.ledger.attempts[-1].ended or "running, or killed",
                )
                for run in runs
            ],
        ),
        "values": _table(
            ("value", *(f"{run.name}: {what}" for run in runs for what in ("last", "least", "most"))),
            [(name, *(each for run in runs for each in _extent(run.curves.get(name)))) for name in values],
        ),
        "settings": _table(
            ("setting", *(run.name for run in runs)),
            [(name, *row) for name, row in differences(runs).items()],
        )
        or f"<p>{'' if unknown_settings(runs) else 'None.'}</p>",
    }


def _drawn(curve: Curve) -> dict[str, list[float | None]]:
    """Return what is drawn of a curve: of each pixel's points the first, least, most and last."""
    steps, values = curve
    count = len(steps)
    if count > 4 * PIXELS:
        cuts = [count * pixel // PIXELS for pixel in range(PIXELS + 1)]
        chosen = sorted({each for start, end in pairwise(cuts) for each in _extremes(values, start, end)})
        steps, values = [steps[each] for each in chosen], [values[each] for each in chosen]
    drawn = [float(f"{each:.7g}") if math.isfinite(each) else None for each in values]
    return {"x": list(steps), "y": drawn}


def _extremes(values: list[float], start: int, end: int) -> set[int]:
    """Return where the least and the largest of some values stand, the first, the last, and a NaN."""
    found = {start, end - 1}
    finite = [each for each in range(start, end) if math.isfinite(values[each])]
    if finite:
        found |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    if len(finite) < end - start:
        found.add(next(each for each in range(start, end) if not math.isfinite(values[each])))
    return found


def _extent(curve: Curve | None) -> tuple[str, str, str]:
    if curve is None:
        return ("", "", "")
    numbers = [each for each in curve[1] if not math.isnan(each)] or [math.nan]
    return (f"{curve[1][-1]:.6g}", f"{min(numbers):.6g}", f"{max(numbers):.6g}")


def _messages(runs: Sequence[RunRecord]) -> str:
    found = [
        (run.name, f"{number}", kind, text)
        for run in runs
        for number, attempt in enumerate(run.ledger.attempts, 1)
        for kind, text in (
            *(("warning", each) for each in attempt.warnings),
            *([(attempt.ended or "", attempt.error)] if attempt.error is not None else []),
        )
    ]
    return _table(("run", "attempt", "kind", "message"), found) or "<p>None.</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; empty without rows."""
    if not rows:
        return ""

    def cells(tag: str, row: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(each))}</{tag}>" for each in row) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{cells("th", head)}</thead><tbody>{body}</tbody></table></div>'
