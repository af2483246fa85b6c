"""Metrics as a CSV table."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from drivetrain.core.files import open_file, read_text
from drivetrain.core.validation import by_name
from drivetrain.loggers.files import FileLogger, naming, replace_text
from drivetrain.loggers.history import LARGEST_TABLE


@by_name
@final
class CSVLogger(FileLogger):
    """Writes one row per logged step to a CSV file: the column "step", then a column per metric.

    Training and validation values of one step share its row. If a metric is logged twice after one step,
    the later value is kept. Numbers are written with all their digits, so that reading them back gives the
    same bits. There is no wall time, so that equal runs write equal files. A metric that first appears later
    adds a column, which is empty in earlier rows. Every row is flushed when it is written, so a kill loses at
    most the last row.

    The first row of a new logger begins a new file; an earlier run's file is renamed to ``metrics.1.csv``.
    After `load_state_dict` the logger appends to the file instead, without the rows that were written after
    the state was taken.

    Args:
        directory: The directory of the file and of ``config.json``; made at the first write.
        filename: The table's file name.
    """

    _begins = b"step"

    def __init__(self, directory: str | Path, filename: str = "metrics.csv") -> None:
        super().__init__(Path(directory) / filename)
        # A dict, for its ordered keys: checking that all names are known is then one operation in C.
        self._columns: dict[str, None] = {}
        self._rows = 0
        self._last: Mapping[str, object] = {}  # the last row that this logger has written, by column

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row, or fill the last one if it has the same step; `step` is the number of steps made."""
        if not self._columns.keys() >= metrics.keys():
            self._widen(metrics)
        file = self._open()
        if file.is_empty:
            self._rows, self._last = 0, {}
            file.write(_table([["step", *self._columns]]).encode())
        before = self._line(self._last) if self._last.get("step") == step else b""
        joins = bool(before) and file.ends_with(before)
        row: dict[str, object] = {name: float(value) for name, value in metrics.items()}
        row = {**self._last, **row} if joins else {"step": step, **row}
        file.write(self._line(row))
        file.flush(over=before if joins else b"")
        self._rows += not joins
        self._last = row

    def _line(self, row: Mapping[str, object]) -> bytes:
        return _table([[row.get(name, "") for name in ("step", *self._columns)]]).encode()

    def state_dict(self) -> dict[str, Any]:
        """Return the table's columns, its number of rows and the cells of the last one."""
        last = self._line(self._last).decode() if self._last else ""
        return {"columns": list(self._columns), "rows": self._rows, "last": last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` without the rows that were added since; a missing or shorter file is kept.

        Added columns stay, empty, if the disk has no room to write the table without them.

        Raises:
            OSError: The file could not be truncated; the logger appends at its end.
        """
        self.close()
        self._columns = dict.fromkeys(state["columns"])
        self._rows, self._last = 0, {}
        self._continues = True
        if not self.path.exists():
            return
        header, rows = self._read()
        columns = ["step", *self._columns]
        if not header:
            self.path.unlink()  # killed before its first row was complete
            return
        if header[: len(columns)] != columns:
            self._continues = False  # another run's table
            return
        self._columns, self._rows = dict.fromkeys(header[1:]), len(rows)  # in case truncating fails
        kept = rows[: int(state["rows"])]
        last = next(csv.reader(io.StringIO(state.get("last", ""))), []) if len(kept) == state["rows"] else []
        if last:  # without what was added to it after the state was taken
            kept[-1] = last + [""] * (len(header) - len(last))
        self._cut([header, *kept])
        self._rows = len(kept)
        if last:
            cells = zip(columns[1:], last[1:], strict=False)
            self._last = {"step": int(last[0]), **{name: cell for name, cell in cells if cell}}
        if header != columns:
            with suppress(OSError):
                replace_text(self.path, _table([columns, *(row[: len(columns)] for row in kept)]))
                self._columns = dict.fromkeys(columns[1:])

    def _cut(self, rows: Sequence[Sequence[object]]) -> None:
        """Truncate the file to these first rows in place, which needs no room on the disk."""
        content = _table(rows).encode()
        with naming(self.path), open_file(self.path, "r+b") as file:
            if file.read(len(content)) == content:
                os.ftruncate(file.fileno(), len(content))
                return
        replace_text(self.path, content.decode())  # another program has written it, with other quoting

    def _widen(self, metrics: Iterable[str]) -> None:
        columns = {**self._columns, **dict.fromkeys(metrics)}
        if self._continues and self.path.exists():
            self.close()
            added = [""] * (len(columns) - len(self._columns))
            _, rows = self._read()
            replace_text(self.path, _table([["step", *columns], *(row + added for row in rows)]))
        self._columns = columns  # only once they are in the file

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the complete rows, without one that a kill has cut short."""
        text = read_text(self.path, LARGEST_TABLE)
        rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        return (rows[0], rows[1:]) if rows else ([], [])


def _table(rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
