"""Run the nightly tests of what a change touches, which no landing runs: `make test-for CHANGE=REVISION`."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "package/drivetrain"
XLA = "xla"  # stands for the whole of `make xla`
# From a folder to the nightly tests that a change there needs; changed tests are always among them.
SETS: dict[str, tuple[str, ...]] = {
    f"{PACKAGE}/core": ("tests/core", "tests/campaigns"),
    f"{PACKAGE}/distributed": ("tests/distributed", "tests/campaigns", "tests/test_notebooks.py"),
    f"{PACKAGE}/checkpoint": ("tests/checkpoint", "tests/campaigns", "tests/integrations"),
    f"{PACKAGE}/data": ("tests/data", "tests/campaigns"),
    f"{PACKAGE}/task": ("tests/task", "tests/strategies", "tests/integrations"),
    f"{PACKAGE}/strategies": ("tests/strategies", "tests/engine", "tests/test_own_strategies.py"),
    f"{PACKAGE}/strategies/xla": (XLA,),
    f"{PACKAGE}/engine": ("tests/engine", "tests/strategies", "tests/benchmarks"),
    f"{PACKAGE}/loggers": ("tests/loggers",),
    f"{PACKAGE}/run": ("tests/run", "tests/campaigns", "tests/benchmarks"),
    f"{PACKAGE}/callbacks": ("tests/callbacks", "tests/test_compression_examples.py"),
    f"{PACKAGE}/trainer": ("tests/trainer", "tests/integrations"),
    f"{PACKAGE}/testing": ("tests/testing", "tests/test_own_strategies.py", XLA),
    f"{PACKAGE}/cli": ("tests/cli",),
    f"{PACKAGE}/integrations": ("tests/integrations",),
    "docs": ("tests/test_docs.py", "tests/test_notebooks.py"),
    "examples": ("tests/test_examples.py", "tests/test_notebooks.py", "tests/test_compression_examples.py"),
    "benchmarks": ("tests/benchmarks",),
    "Makefile": (XLA,),
}


def sets_of(files: Iterable[str]) -> list[str]:
    """Return what has to run for changed files (paths from the root), in order, once each."""
    found: set[str] = set()
    for file in files:
        for folder, sets in SETS.items():
            if file == folder or file.startswith(f"{folder}/"):
                found.update(sets)
        parts = file.split("/")
        if parts[0] == "tests" and len(parts) > 2:
            found.add(XLA if parts[1] == "xla" else f"tests/{parts[1]}")
    return sorted(found)


def main() -> int:  # run them; return the exit code of the first that fails
    (change,) = sys.argv[1:]
    sets = sets_of(
        subprocess.check_output(["git", "diff", "--name-only", change], cwd=ROOT, text=True).split()
    )
    paths = [each for each in sets if each != XLA and (ROOT / each).exists()]
    print(f"nightly tests for the change since {change}: {' '.join(sets) or 'none'}", flush=True)
    codes = []
    if paths:
        command = [sys.executable, "-m", "pytest", "-n", "2", "-m", "nightly", "--durations", "10", *paths]
        # pytest's 5 says that the folders have no nightly test.
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode % 5)
    if XLA in sets:
        codes.append(subprocess.run(["make", "xla"], cwd=ROOT, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
