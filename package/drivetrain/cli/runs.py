"""`drivetrain runs`: which runs there are, and what the time of one went to."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from drivetrain.cli.printing import aged, any_text, line, print_json, section, table
from drivetrain.errors import ConfigError, DataError, nearest
from drivetrain.runs import KINDS, Attempt, RunLedger, find_runs, read_ledger

_SHOWN = 20
"""Attempts of a run that are listed; with --all, or as JSON, there is no end."""

_OVERLAP = 1.0
"""Seconds that two attempts may seem to run at once, by clocks of two machines."""


class _Action(NamedTuple):
    """What can be done: in a few words, what there is to know of it, and what PATH is."""

    purpose: str
    about: str
    path: str


_ACTIONS = {
    "list": _Action(
        "list the runs in a directory",
        "With how often each was started, how far it came, how long it took, and its goodput. Exit code 1"
        " if there is none that can be read.",
        "a directory of runs, such as runs",
    ),
    "show": _Action(
        "show what the time of a run went to, over all its restarts",
        "Goodput is the share of the time that went into updates that count: the wall time without set-up,"
        " waiting for data, evaluation, saving, restoring, updates that were made again, and waiting to be"
        " started again.",
        "a run directory, or its ledger.jsonl",
    ),
}


def run(words: Sequence[str]) -> int:
    """Run `drivetrain runs` with the words behind it, and return the exit code.

    Raises:
        ConfigError: An unknown option.
        DataError: There is no such run.
        SystemExit: A usage message, or help, was printed.
    """
    parsed, unknown = _parser().parse_known_args(words)
    if unknown:
        allowed = ["--json", "--debug", *(["--all"] if parsed.action == "show" else [])]
        raise ConfigError(
            f"drivetrain runs {parsed.action}: unknown argument {unknown[0]}. {nearest(unknown[0], allowed)}"
        )
    with any_text():
        return _DOES[parsed.action](parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain runs",
        description="List runs, and show what the time of one went to.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, action in _ACTIONS.items():
        description = f"{action.purpose[0].upper()}{action.purpose[1:]}. {action.about}"
        command = commands.add_parser(name, help=action.purpose, description=description, allow_abbrev=False)
        command.add_argument("path", metavar="PATH", help=action.path)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--debug", action="store_true", help="show the traceback of every error")
        if name == "show":
            command.add_argument("--all", action="store_true", help="list every attempt")
    return parser


def _list(parsed: argparse.Namespace) -> int:
    found: list[RunLedger] = []
    trouble: list[str] = []
    for each in find_runs(parsed.path):
        try:
            found.append(read_ledger(each))
        except DataError as error:
            trouble.append(str(error))
    if not found and not trouble:
        raise DataError(f"there is no run with a ledger.jsonl in {parsed.path!r}, nor in what is below it")
    if parsed.json:
        print_json({"runs": [each.to_json() for each in found], "trouble": trouble})
        return 0 if found else 1
    table(
        ("run", "attempts", "updates", "wall", "goodput", "ended", "heard"),
        [
            (
                str(each.directory),
                str(len(each.attempts)),
                str(each.updates),
                _span(each.wall),
                f"{each.goodput:.1%}",
                _ended(each.attempts[-1]),
                f"{aged(time.time() - each.attempts[-1].heard)} ago",
            )
            for each in found
        ],
        numbers=(1, 2, 3, 4, 6),
    )
    for text in trouble:
        line(text)
    return 0 if found else 1


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
            ("heard of", f"{_moment(last.heard)}, {aged(time.time() - last.heard)} ago"),
            ("attempts", str(len(ledger.attempts))),
            ("updates", str(ledger.updates)),
            ("ended", _ended(last)),
            ("wall time", _span(ledger.wall)),
            ("goodput", f"{ledger.goodput:.1%}, which is compute / wall time"),
        ],
    )
    line()
    seconds, wall = ledger.seconds, ledger.wall or 1.0
    rows = [(kind, f"{seconds[kind]:.1f}", f"{seconds[kind] / wall:.1%}") for kind in KINDS]
    table(("", "seconds", "share"), [*rows, ("wall time", f"{ledger.wall:.1f}", "100.0%")], numbers=(1, 2))
    _show_attempts(ledger, None if parsed.all else _SHOWN)
    _show_trouble(ledger)
    return 0


def _show_attempts(ledger: RunLedger, most: int | None) -> None:
    numbered = list(enumerate(ledger.attempts, 1))
    if len(numbered) == 1:
        return
    shown = numbered if most is None else numbered[-most:]
    line()
    head = ("attempt", "began", "waited", "lasted", "compute", "lost work", "updates", "ended")
    table(
        head,
        [
            (
                str(number),
                _moment(each.began),
                _span(each.waited),
                _span(each.wall),
                _span(each.seconds["compute"]),
                _span(each.seconds["lost work"]),
                "none" if each.resumed is None else f"{each.resumed} to {each.updates}",
                _ended(each),
            )
            for number, each in shown
        ],
        numbers=(0, 2, 3, 4, 5),
    )
    if len(shown) < len(numbered):
        line(f"and {len(numbered) - len(shown)} before; --all lists them")


def _show_trouble(ledger: RunLedger) -> None:
    if ledger.unreadable:
        line()
        line(f"lines that cannot be read: {ledger.unreadable}, such as one in which a process was killed")
    ends = zip(ledger.attempts, ledger.attempts[1:], strict=False)
    at_once = sum(each.began < before.heard - _OVERLAP for before, each in ends)
    if at_once:
        line()
        line(
            f"attempts that began before the one before had ended: {at_once}; either a clock was set, or two"
            " programs have trained in this directory at once"
        )


def _ended(attempt: Attempt) -> str:
    return attempt.ended or "no last word"


def _moment(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _span(seconds: float) -> str:
    """A span of time in its two largest units: "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, length, lower, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} {seconds % length // part:02.0f} {lower}"
    raise AssertionError(seconds)


_DOES: Mapping[str, Callable[[argparse.Namespace], int]] = {"list": _list, "show": _show}
"""What is done for each action."""
