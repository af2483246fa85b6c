"""What a part finds, written as it comes."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Journal:
    """Appends rows to a file of JSON lines, each at once, so that a process that is ended keeps its rows.

    Args:
        path: The file.
        part: The part's name, which every row has.
        until: The time (of `time.time`) at which the part is ended.

    Attributes:
        failed: Whether something failed that must not.
        longest: Seconds that each thing took the last time.
    """

    def __init__(self, path: Path, part: str, until: float = float("inf")) -> None:
        self.path = path
        self.part = part
        self.until = until
        self.failed = False
        self.longest: dict[str, float] = {}

    def write(self, kind: str, **values: Any) -> None:
        """Append a row, and print it."""
        line = json.dumps({"part": self.part, "kind": kind, **values})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line, flush=True)

    def left(self) -> float:
        """Return the seconds until the part is ended; five are kept for its end."""
        return self.until - time.time() - 5

    @contextmanager
    def attempt(self, what: str, counts: bool = True) -> Iterator[None]:
        """Let the rest of the part go on after an error, which becomes a row.

        Args:
            what: What is tried.
            counts: Whether the part has failed then.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            said = str(error).strip().splitlines()
            self.write("error", what=what, error=f"{type(error).__name__}: {said[0] if said else ''}"[:300])
            self.failed |= counts
