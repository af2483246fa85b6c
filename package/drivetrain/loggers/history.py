"""Reading a run's logged values back from its table.

Imports no torch, so that the command line starts fast.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import ConfigError
from drivetrain.core.files import loads, read_text

if TYPE_CHECKING:
    from drivetrain.loggers.base import LoggerSpec

HISTOGRAMS = "histograms"
"""The name of a log point's histograms in JSON lines."""

LARGEST_TABLE = 1 << 30
"""The largest file of metrics, in bytes, that is read as a whole."""

TABLES = {"csv": "metrics.csv", "jsonl": "metrics.jsonl"}
"""The files of the named loggers that can be read back."""


def table_of(spec: LoggerSpec, run_dir: Path | None) -> Path | None:
    """Return the file that a run's values are logged to, or None if no logger writes one.

    Args:
        spec: The argument of `Trainer(loggers=...)`.
        run_dir: Where named loggers write.
    """
    from drivetrain.loggers.base import check_loggers
    from drivetrain.loggers.files import FileLogger

    for each in check_loggers(spec):
        if isinstance(each, FileLogger):
            return each.path
        if isinstance(each, str) and each in TABLES and run_dir is not None:
            return run_dir / TABLES[each]
    return None


def read_history(path: Path) -> list[dict[str, float]]:
    """Return the rows of a file of `CSVLogger` or `JSONLinesLogger`, oldest first.

    Args:
        path: The file.

    Returns:
        A mapping for each step after which something was logged: "step", the number of steps made, and
        the values by name. A last line that a kill has cut short is left out, and so are histograms.

    Raises:
        ConfigError: There is no such file, or neither logger has written it.
    """
    try:
        return _rows(read_text(path, LARGEST_TABLE))  # with line ends as they are, which a name may have
    except FileNotFoundError:
        raise ConfigError(f"the history is read from {str(path)!r}, and there is no such file") from None
    except (AttributeError, LookupError, OSError, TypeError, ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{str(path)!r} cannot be read as the history of a run ({error!r}): give the metrics.csv or"
            " metrics.jsonl that a logger has written"
        ) from error


def _rows(text: str) -> list[dict[str, float]]:
    whole = text[: text.rfind("\n") + 1]
    rows: list[dict[str, str]]
    if text.startswith("{"):
        rows = [loads(each) for each in whole.split("\n")[:-1]]
    else:
        rows = list(csv.DictReader(io.StringIO(whole, newline="")))
    joined: list[dict[str, float]] = []
    for each in rows:
        if isinstance(each.get(HISTOGRAMS), dict):
            continue
        row: dict[str, float] = {"step": int(each["step"])}
        row |= {name: float(value) for name, value in each.items() if name != "step" and value != ""}
        if joined and joined[-1]["step"] == row["step"]:
            joined[-1].update(row)
        else:
            joined.append(row)
    return joined
