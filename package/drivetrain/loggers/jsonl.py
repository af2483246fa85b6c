"""Metrics as JSON lines: one object per log point, for scripts and `jq`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, final

from drivetrain.core.files import lines_of, open_file
from drivetrain.core.validation import by_name
from drivetrain.loggers.files import FileLogger, naming, to_json
from drivetrain.loggers.history import HISTOGRAMS
from drivetrain.loggers.media import Histogram, Kind, Media


@by_name
@final
class JSONLinesLogger(FileLogger):
    """Writes one JSON object per log point: ``{"step": 50, "train/loss": 0.512}``.

    Histograms of a log point are an object of their own: ``{"step": 50, "histograms": {name: {"edges": [...],
    "counts": [...], ...}}}``, with the fields of `drivetrain.loggers.BinCounts`.

    The JSON is strict. Non-finite numbers become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``,
    which Python's ``float`` and most other parsers of numbers accept. Finite numbers have all their digits,
    and there is no wall time, so that equal runs write equal files. Every line is flushed when it is written,
    so a kill loses at most that line.

    The first line of a new logger begins a new file; an earlier run's file is renamed to ``metrics.1.jsonl``.
    After `load_state_dict` the logger appends to the file instead, without the lines that were written after
    the state was taken.

    Args:
        directory: The directory of the file and of ``config.json``; made at the first write.
        filename: The file's name.
    """

    _begins = b'{"step": '
    takes: ClassVar[frozenset[Kind]] = frozenset({"histogram"})

    def __init__(self, directory: str | Path, filename: str = "metrics.jsonl") -> None:
        super().__init__(Path(directory) / filename)
        self._lines = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"step": step, **{name: to_json(float(value)) for name, value in metrics.items()}})

    def log_media(self, values: Mapping[str, Media], step: int) -> None:
        """Write one line with the histograms; `step` is the number of steps made."""
        found = {name: each.counts for name, each in values.items() if isinstance(each, Histogram)}
        named = {name: to_json(asdict(each)) for name, each in found.items()}
        self._write({"step": step, HISTOGRAMS: named})

    def _write(self, row: Mapping[str, Any]) -> None:
        file = self._open()
        if file.is_empty:
            self._lines = 0
        file.write(f"{json.dumps(row, allow_nan=False)}\n".encode())
        file.flush()
        self._lines += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of lines."""
        return {"lines": self._lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._continues = True
        self._lines = 0
        if not self.path.exists():
            return
        # Counting lines, not bytes, also finds the end when the last line was cut short by a kill.
        kept = end = 0
        for line in lines_of(self.path):
            if not line.endswith(b"\n"):
                break
            if self._lines < int(state["lines"]):
                kept, end = kept + 1, end + len(line)
            self._lines += 1
        with naming(self.path), open_file(self.path, "r+b") as file:
            os.ftruncate(file.fileno(), end)
        self._lines = kept
