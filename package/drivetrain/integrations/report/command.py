"""`drivetrain runs report`: writes the page, once or as often as the files of a run under way change."""

from __future__ import annotations

import argparse
import html
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.cli.printing import line
from drivetrain.cli.run_record import read_runs, read_searches
from drivetrain.core.errors import ConfigError, DataError, plain
from drivetrain.core.files import check_own, make_directory
from drivetrain.core.messages import sized
from drivetrain.integrations.report.contents import page_contents, run_contents
from drivetrain.integrations.report.media import fit_to
from drivetrain.loggers.files import replace_text

SECONDS = 5.0
"""Seconds between two looks at the files, and between two times that the page loads itself."""

_GENERATOR = b'<meta name="generator" content="drivetrain">'
"""Says in a page who has written it: another file of that name is not replaced."""

_MEDIA = 12_000_000
"""The most characters of pictures, tables, texts and sounds on a page."""


def report(parsed: argparse.Namespace) -> int:
    """Run `drivetrain runs report`, and return the exit code."""
    path = Path(parsed.output)
    if path.is_dir():
        raise ConfigError(f"--output {parsed.output!r} is a directory; give a file, such as report.html")
    page = ReportPage(parsed.paths)
    line(page.write(path, refresh=SECONDS if parsed.watch else None))
    if parsed.watch:
        line("watching; Ctrl-C ends it")
        watch(page, path)
    return 0


class ReportPage:
    """The page of some runs, which reads again only the runs whose files have changed.

    Args:
        paths: Run directories, and directories of runs.
        storage: The address of the storage of a search, where it has a password.
    """

    def __init__(self, paths: Sequence[str], storage: str | None = None) -> None:
        self._paths = paths
        self._storage = storage
        self._read: dict[Path, tuple[object, dict[str, Any]]] = {}

    def write(self, path: Path, refresh: float | None = None) -> str:
        """Write the page, and return a sentence about it.

        Args:
            path: The file.
            refresh: Seconds after which the page loads itself again; None never.

        Raises:
            NotAFileError: Somebody else has written the file.
        """
        records = read_runs(self._paths)
        found = []
        for record in records:
            directory = record.ledger.directory
            state = (len(records), self._state(directory))
            if self._read.get(directory, (None,))[0] != state:
                self._read[directory] = (state, run_contents(record, len(records)))
            found.append({**self._read[directory][1], "name": plain(record.name)})
        media, left = fit_to([each["media"] for each in found], _MEDIA)
        runs = [{**each, "media": own} for each, own in zip(found, media, strict=True)]
        searches = read_searches((each.ledger.directory for each in records), self._storage)
        contents = page_contents(records, runs, searches, left, refresh)
        make_directory(path.parent)
        check_own(path, lambda before: _GENERATOR in before)
        replace_text(path, make_page(contents))
        counts = {"run": len(runs), "curve": len(contents["curves"]), "search": len(searches)}
        parts = [
            f"{number} {name}{('es' if name == 'search' else 's') * (number != 1)}"
            for name, number in counts.items()
            if number or name != "search"
        ]
        return f"{path}: {', '.join(parts)}, {sized(path.stat().st_size)}; open it in a browser"

    def state(self) -> dict[Path, object]:
        """Return what changes when the files of the runs do."""
        return {each.ledger.directory: self._state(each.ledger.directory) for each in read_runs(self._paths)}

    def has_ended(self) -> bool:
        """Return whether every run has an end and no further ones can come, as they do below a directory."""
        given = {Path(each) for each in self._paths}
        return all(
            each.ledger.attempts[-1].ended is not None and each.ledger.directory in given
            for each in read_runs(self._paths)
        )

    def _state(self, directory: Path) -> object:
        files = [each for each in directory.iterdir() if each.is_file()]
        return sorted((each.name, (found := each.stat()).st_mtime_ns, found.st_size) for each in files)


def watch(page: ReportPage, path: Path, wait: Callable[[float], object] = time.sleep) -> None:
    """Write the page again whenever the files of its runs change, until all runs have ended, or Ctrl-C.

    Args:
        page: The page.
        path: Its file.
        wait: Waits for so many seconds.
    """
    before = page.state()
    with suppress(KeyboardInterrupt):
        while not page.has_ended():
            wait(SECONDS)
            with suppress(DataError, FileNotFoundError):  # a file that is being replaced
                if (now := page.state()) != before:
                    page.write(path, refresh=SECONDS)
                    before = now
    line(page.write(path))


def make_page(contents: dict[str, Any]) -> str:
    """Return the page, in HTML, with its style, its program and its contents."""
    parts = {
        # In a script "<" could begin its end.
        "data": json.dumps(contents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "title": html.escape(contents["title"]),
        "style": _text("page.css"),
        "program": _text("page.js"),
    }
    pieces = _text("page.html").split("@@")  # every second one is the name of a part
    return "".join(parts[each] if number % 2 else each for number, each in enumerate(pieces))


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
