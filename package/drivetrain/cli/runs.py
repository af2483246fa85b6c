"""`drivetrain runs`: list runs, show how one spent its time, compare some, and draw their curves."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.cli.printing import line, print_json, section, shortened, span, table
from drivetrain.cli.run_record import (
    best_of,
    differences,
    last_values,
    read_runs,
    read_searches,
    unknown_settings,
)
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.run.ledger_report import KINDS, NAME, Attempt, RunLedger, find_runs, read_ledger

_ABOUT = {
    "list": "List the runs in a directory, with the best value, starts, steps, wall time and goodput of each,"
    " and trials below their search. Exit code 1 if none can be read.",
    "show": "Show how a run spent its time, over all its restarts. Goodput is the share of the wall time"
    " spent on steps that count. Set-up, waiting for data, evaluation, saving, restoring, repeated steps"
    " and waiting for a restart do not count.",
    "compare": "Compare runs: the settings in which they differ, and the last value of each name.",
    "report": "Write one HTML file with the curves, settings, time, failures and pictures of runs, and of a"
    " search with its trials. It needs no network.",
}
_PATHS = {"list": "a directory of runs; runs if not given", "show": "a run directory, or its ledger.jsonl"}
_RUNS = "a run directory, or a directory of runs"
_OUTPUT = "the file to write; report.html if not given"
_WATCH = "write it again whenever a run goes on, until all have ended; the page reloads itself"


def run(words: Sequence[str]) -> int:
    """Run `drivetrain runs` with the words after it, and return the exit code."""
    parsed = _parser().parse_args(words)
    return _ACTIONS[parsed.action](parsed)


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain runs",
        description="List runs, show how one spent its time, compare runs, and draw their curves.",
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, about in _ABOUT.items():
        purpose = about.partition(",")[0].lower()
        command = commands.add_parser(name, help=purpose, description=about)
        if name in _PATHS:
            nargs = "?" if name == "list" else None
            command.add_argument("path", metavar="PATH", nargs=nargs, default="runs", help=_PATHS[name])
        else:
            command.add_argument("paths", metavar="RUN", nargs="+", help=_RUNS)
        command.add_common(json=name != "report")
        if name == "report":
            command.add_argument("--output", default="report.html", metavar="FILE", help=_OUTPUT)
            command.add_argument("--watch", action="store_true", help=_WATCH)
    return parser


def _list(parsed: argparse.Namespace) -> int:
    found: list[tuple[RunLedger, tuple[str, float, float] | None]] = []
    trouble: list[str] = []
    for each in find_runs(parsed.path):
        try:
            (record,) = read_runs([str(each / NAME)])
            found.append((record.ledger, best_of(record.read_curves(), record.settings)))
        except (ConfigError, DataError) as error:
            trouble.append(str(error))
    if not found and not trouble:
        raise DataError(f"there is no run with a ledger.jsonl in {parsed.path!r} or below it")
    searches = read_searches(ledger.directory for ledger, _ in found)
    if parsed.json:
        runs = [
            {
                **ledger.to_json(),
                "best": dict(zip(("name", "value", "step"), best, strict=True)) if best else None,
            }
            for ledger, best in found
        ]
        print_json({"runs": runs, "searches": searches, "trouble": trouble})
        return 0 if found else 1
    head = ("run", "best", "attempts", "steps", "wall", "goodput", "ended", "heard")
    table(head, _rows(found, searches), numbers=(2, 3, 4, 5, 7))
    for text in trouble:
        line(text)
    return 0 if found else 1


def _rows(
    found: Sequence[tuple[RunLedger, tuple[str, float, float] | None]], searches: Sequence[dict[str, Any]]
) -> list[Sequence[str]]:
    """Return a row for each run; those of a search's trials stand below a row of the search."""
    states = {each["run"]: each["state"] for search in searches for each in search.get("trials", ())}
    headings = {each["directory"]: [_search_row(each)] for each in searches}
    rows: list[Sequence[str]] = []
    for ledger, best in found:
        directory, heading = str(ledger.directory), headings.get(str(ledger.directory.parent))
        while heading:
            rows.append(heading.pop())
        state, last = states.get(directory), ledger.attempts[-1]
        rows.append(
            (
                directory if heading is None else f"  {ledger.directory.name}",
                "" if best is None else f"{best[0]} {_number(best[1])}",
                str(len(ledger.attempts)),
                str(ledger.steps),
                span(ledger.wall),
                f"{ledger.goodput:.1%}",
                state if state in ("pruned", "failed") else _ended(last),
                f"{span(time.time() - last.heard)} ago",
            )
        )
    return rows


def _search_row(search: Mapping[str, Any]) -> Sequence[str]:
    if "problem" in search:
        return (f"{search['directory']}: a search", "", "", "", "", "", shortened(search["problem"]), "")
    trials, name = search["trials"], search["objectives"][0]
    states = [each["state"] for each in trials]
    counts = ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states))
    best = next(
        (f"trial {each}: {name} {_number(trials[each]['values'][name])}" for each in search["best"]), ""
    )
    return (f"{search['directory']}: a search", best, "", "", "", "", counts, "")


def _show(parsed: argparse.Namespace) -> int:
    ledger = read_ledger(parsed.path)
    if parsed.json:
        print_json(ledger.to_json())
        return 0
    last = ledger.attempts[-1]
    section(
        f"Run {ledger.directory}",
        [
            ("began", _moment(ledger.attempts[0].began)),
            ("heard of", f"{_moment(last.heard)}, {span(time.time() - last.heard)} ago"),
            ("attempts", str(len(ledger.attempts))),
            ("steps", str(ledger.steps)),
            ("ended", _ended(last)),
            ("wall time", span(ledger.wall)),
            ("goodput", f"{ledger.goodput:.1%}, which is compute / wall time"),
        ],
    )
    line()
    seconds, wall = ledger.seconds, ledger.wall or 1.0
    rows = [(kind, f"{seconds[kind]:.1f}", f"{seconds[kind] / wall:.1%}") for kind in KINDS]
    table(("", "seconds", "share"), [*rows, ("wall time", f"{ledger.wall:.1f}", "100.0%")], numbers=(1, 2))
    if len(ledger.attempts) > 1:
        line()
        table(
            ("attempt", "began", "waited", "lasted", "compute", "lost work", "steps", "ended"),
            [
                (
                    str(number),
                    _moment(each.began),
                    span(each.waited),
                    span(each.wall),
                    span(each.seconds["compute"]),
                    span(each.seconds["lost work"]),
                    "none" if each.resumed is None else f"{each.resumed} to {each.steps}",
                    _ended(each, is_last=each is last),
                )
                for number, each in enumerate(ledger.attempts, 1)
            ],
            numbers=(0, 2, 3, 4, 5),
        )
    if ledger.unreadable:
        line()
        line(f"unreadable lines: {ledger.unreadable}; a process that is killed may leave half a line")
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    runs = read_runs(parsed.paths)
    if len(runs) < 2:
        raise ConfigError("drivetrain runs compare: give two runs or more")
    differing = differences(runs)
    last = last_values(runs)
    unknown = unknown_settings(runs)
    if parsed.json:
        print_json({"runs": [str(run.ledger.directory) for run in runs], "settings": differing, "last": last})
        return 0
    head = ["", *(run.name for run in runs)]
    table(head, [[name, *map(shortened, row)] for name, row in differing.items()])
    if not differing or unknown:
        line(unknown or "the settings are the same")
    line()
    rows = [[name, *map(_number, row)] for name, row in last.items()]
    steps = ["step", *(f"{run.ledger.steps}" for run in runs)]
    table(head, [steps, *rows], numbers=range(1, len(head)))
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _report(parsed: argparse.Namespace) -> int:
    return int(importlib.import_module("drivetrain.integrations.report.command").report(parsed))


_ACTIONS = {"list": _list, "show": _show, "compare": _compare, "report": _report}


def _ended(attempt: Attempt, is_last: bool = True) -> str:
    return attempt.ended or ("running, or killed" if is_last else "killed")


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
