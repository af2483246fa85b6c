"""A tracked fit that is killed twice, for the tests of each tracker."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.forked import run_forked, undisturbed

from drivetrain.loggers.history import read_history

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"


def run_program(name: str, *arguments: str, **environment: str) -> str:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**undisturbed(), "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = run_forked([str(PROGRAMS / name), *arguments], Path.cwd(), environment, timeout=300)
    assert done.returncode in (0, -9), done.stderr[-4000:]
    return done.stdout


def killed_twice(
    name: str, options: Mapping[str, Any], prompt: Mapping[str, Any] | None = None, **environment: str
) -> None:
    """Two kills: as soon as it has logged, and with the options `prompt` once the tracker has stored that."""
    second = (options, 9, False) if prompt is None else (prompt, 9, True)
    for given, killed_after, waits in ((options, 5, False), second, (options, None, False)):
        words = [name, json.dumps(given), json.dumps(killed_after), json.dumps(waits)]
        run_program("tracked.py", *words, **environment)


def assert_each_value_once(found: Iterable[tuple[int, str, float]]) -> None:
    """The tracker has what the table has, and the epoch of each log point, and nothing twice."""
    table = read_history(Path("run/metrics.csv"))
    assert len(table) == 10
    wanted = [(row["step"], name, value) for row in table for name, value in row.items() if name != "step"]
    wanted += [(row["step"], "epoch", row["step"] // 5) for row in table]
    assert sorted(found) == sorted(wanted)
