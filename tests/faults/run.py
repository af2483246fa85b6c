"""Plant faults, one at a time in a copy of the package, and see the tests fail that are to see them.

    python -m tests.faults.run [WORDS ...]    only the faults whose name has all of these words

A process that has imported torch is forked for each fault, two at a time; a new interpreter would import for
seconds. mutmut and cosmic-ray choose their faults themselves and run for hours: they find what no test sees,
and do not keep watch over the faults that must be seen. `make faults` runs this.
"""

import contextlib
import gc
import importlib
import io
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
FAULTS = Path(__file__).with_name("faults.toml")
AT_ONCE = 2


class Outcomes:
    """A plugin of pytest: the tests that failed, and how many ran."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.ran = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.failed.append(report.nodeid)


def planted(fault: dict[str, Any], package: Path) -> None:
    """Change a fault's line in a copy of the package; it must stand there exactly once."""
    path = package / "drivetrain" / fault["file"]
    lines = path.read_text(encoding="utf-8").splitlines()
    places = [number for number, line in enumerate(lines) if line.strip() == fault["line"]]
    if len(places) != 1:
        raise LookupError(f"{fault['file']} has the line {fault['line']!r} {len(places)} times")
    old = lines[places[0]]
    lines[places[0]] = old[: len(old) - len(old.lstrip())] + fault["becomes"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def unseen(test: str, package: Path) -> str:
    """Run a test in this process with a copy of the package; return "" if it fails, or else what it did."""
    import pytest

    sys.path.insert(0, str(package))
    os.environ["PYTHONPATH"] = str(package)
    outcomes = Outcomes()
    options = ["-n0", "-p", "no:cacheprovider", "-x", "-m", "not (nightly or extended)"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(
            [*options, f"--basetemp={package}/temp", f"{ROOT}/tests/{test}"], plugins=[outcomes]
        )
    loaded = Path(importlib.import_module("drivetrain").__file__ or "")
    if package not in loaded.parents:
        return f"{test}: the copy was not loaded, but {loaded}"
    if code not in (0, 1) or not (outcomes.ran or outcomes.failed):
        return f"{test}: pytest's code {code}: {printed.getvalue()[-600:]}"
    return "" if outcomes.failed else f"{test}: all {outcomes.ran} tests pass"


def in_fork(fault: dict[str, Any], test: str, report: Path) -> NoReturn:
    """Be the process of one test of a fault: report whether it sees the fault, and end."""
    gc.unfreeze()
    with tempfile.TemporaryDirectory() as directory:
        package = Path(directory) / "package"
        shutil.copytree(ROOT / "package", package, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            planted(fault, package)
            text = unseen(test, package)
        except BaseException as error:
            text = f"{test}: {type(error).__name__}: {error}"
        report.write_text(text, encoding="utf-8")
    os._exit(0)


def main(words: Sequence[str]) -> int:
    """Try all faults; return 1 if one goes unseen."""
    faults = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    faults = [each for each in faults if all(word in each["name"] for word in words)]
    left = [(fault, test) for fault in faults for test in fault["tests"]]
    for name in ("torch.distributed", "numpy"):  # not what pytest rewrites, which is its plugins
        importlib.import_module(name)
    gc.freeze()
    begun, running = time.monotonic(), dict[int, tuple[str, Path]]()
    missed: set[str] = set()
    with tempfile.TemporaryDirectory() as directory:
        while left or running:
            while left and len(running) < AT_ONCE:
                fault, test = left.pop(0)
                report = Path(directory) / str(len(left))
                pid = os.fork()
                if pid == 0:
                    in_fork(fault, test, report)
                running[pid] = fault["name"], report
            pid, _ = os.wait()
            name, report = running.pop(pid)
            text = report.read_text(encoding="utf-8") if report.exists() else "its process died"
            if text:
                missed.add(name)
            print(f"UNSEEN: {name}: {text}" if text else f"seen: {name}", flush=True)
    print(
        f"{len(faults) - len(missed)} of {len(faults)} faults seen, in {time.monotonic() - begun:.0f} seconds"
    )
    return int(bool(missed) or not faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
