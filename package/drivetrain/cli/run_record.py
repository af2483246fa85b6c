"""The record of a run in its directory: the values it logged, its settings, its ledger and its search."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.core.direction import direction_of
from drivetrain.core.errors import ConfigError, DataError, MissingDependencyError
from drivetrain.core.files import read_json
from drivetrain.core.registry import Registry
from drivetrain.run.ledger_report import RunLedger, find_runs, read_ledger

_ABSENT = "not given"
_UNKNOWN = "unknown"  # of a run without config.json

Curve = tuple[list[float], list[float]]
"""Steps and values."""

_SEARCHES: Registry[Callable[[Path, str | None], dict[str, Any]]] = Registry(
    "kind of search", {"search": "drivetrain.integrations.optuna.report:search_facts"}
)


@dataclass(frozen=True)
class RunRecord:
    """A run as its directory tells of it.

    Attributes:
        name: The directory's name; with its parents where two runs would have the same.
        ledger: Its time, warnings and failures.
        settings: `config.json`, flattened: "trainer.precision" and so on. Empty if no logger has written it.
    """

    name: str
    ledger: RunLedger
    settings: Mapping[str, Any]

    def read_curves(self) -> dict[str, Curve]:
        """Read the logged values by name. They are not kept: those of a sweep are large."""
        return _curves(self.ledger.directory)


def read_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Read runs; a directory without a ledger stands for the runs below it."""
    ledgers = [read_ledger(run) for each in paths for run in _runs_at(Path(each))]
    directories = [each.directory.resolve() for each in ledgers]
    return [
        RunRecord(name, ledger, _flat(_settings(ledger.directory)))
        for name, ledger in zip(_names(directories), ledgers, strict=True)
    ]


def differences(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the settings in which runs differ: by name, the value of each run as a text."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    found = {}
    for name in names:
        row = [str(run.settings.get(name, _ABSENT)) if run.settings else _UNKNOWN for run in runs]
        if len(set(row) - {_UNKNOWN}) > 1:
            found[name] = row
    return found


def last_values(runs: Sequence[RunRecord]) -> dict[str, list[float | None]]:
    """Return the last value of each name, by run; None in a run without the name."""
    curves = [run.read_curves() for run in runs]
    names = dict.fromkeys(name for each in curves for name in each)
    return {name: [each[name][1][-1] if name in each else None for each in curves] for name in names}


def best_of(curves: Mapping[str, Curve], settings: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """Return the name, the value and the step of a run's best value; None without values.

    The name is the one that its checkpoints are chosen by, else "validation/loss", else another one of
    validation, else "train/loss".
    """
    by, mode = str(settings.get("trainer.checkpoint.by")), settings.get("trainer.checkpoint.mode")
    validated = [each for each in curves if each.startswith("validation/") and direction_of(each)]
    for name in (by, "validation/loss", *validated, "train/loss"):
        points = [each for each in zip(*curves.get(name, ([], [])), strict=True) if not math.isnan(each[1])]
        if points:
            direction = mode if name == by and mode in ("min", "max") else direction_of(name)
            step, value = (max if direction == "max" else min)(points, key=lambda each: each[1])
            return name, value, step
    return None


def read_searches(directories: Iterable[Path], storage: str | None = None) -> list[dict[str, Any]]:
    """Return the searches that runs are trials of, as plain values; of one that cannot be read the "problem".

    Args:
        directories: The run directories.
        storage: The address of the storage, where it has a password.
    """
    found = []
    for each in dict.fromkeys(directory.parent for directory in directories):
        if (each / "search.json").is_file():
            try:
                found.append(_SEARCHES["search"](each, storage))
            except (ConfigError, MissingDependencyError) as error:
                found.append({"directory": str(each), "problem": str(error)})
    return found


def _runs_at(path: Path) -> list[Path]:
    found = find_runs(path)  # sorted: a run stands before those below it
    return found if found and found[0] not in (path, path.parent) else [path]


def unknown_settings(runs: Sequence[RunRecord]) -> str:
    """Return a sentence that names the runs whose settings are unknown, or an empty text."""
    names = ", ".join(run.name for run in runs if not run.settings)
    return names and f"unknown settings, because no logger wrote config.json: {names}"


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that differ from one another."""
    for length in range(1, max(len(each.parts) for each in directories) + 1):
        names = ["/".join(each.parts[-length:]) for each in directories]
        if len(set(names)) == len(names):
            return names
    return [str(each) for each in directories]


def _curves(directory: Path) -> dict[str, Curve]:
    from drivetrain.loggers.history import TABLES, read_history

    for name in TABLES.values():
        if (directory / name).is_file():
            found: dict[str, Curve] = {}
            for row in read_history(directory / name):
                for key, value in row.items():
                    if key != "step":
                        steps, values = found.setdefault(key, ([], []))
                        steps.append(row["step"])
                        values.append(value)
            return found
    return {}


def _settings(directory: Path) -> Any:
    file = directory / "config.json"
    if not file.is_file():
        return {}
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for key, each in value.items():
        found |= _flat(each, f"{prefix}.{key}" if prefix else str(key))
    return found
