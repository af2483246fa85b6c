"""Run everything that can use an NVIDIA GPU, and report it: `make gpu`, or `python tests/gpu/run.py`.

Nothing is installed: this runs with the Python and the torch of the machine, takes further packages from
PYTHONPATH, and names and skips what is missing. Each part is a process with a time limit; all of them take at
most 8 minutes. The report is in the folder that the variable OUT names, or in gpu-report: gpu.md and gpu.json
as they are after each part, the output of each part, and rows.jsonl with what was measured, as it came.

The exit code is 0 where every part passed, 1 where one failed, and 2 where there is no GPU to run on. The
parts' own are in the report. `--size small` runs the same parts on a CPU with tiny models, to try them out.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from gpu.page import page  # noqa: E402
from gpu.plan import LIMIT, PLAN  # noqa: E402

CORE = {
    "numpy": "the package itself",
    "xxhash": "checkpoints",
    "safetensors": "weights read by other programs",
    "torchmetrics": "declared metrics",
    "tensorboard": "the TensorBoard logger",
    "tqdm": "the progress bar",
    "jsonargparse": "the command line",
}
"""The package's own requirements, and what needs them."""

COMPILED = Path(tempfile.gettempdir(), f"drivetrain-gpu-{os.getpid()}")
"""What is compiled, for as long as this runs: the parts share it, and no other run does."""

EXTRAS = {
    "pytest": "the tests",
    "triton": "compilation",
    "torchao": "fp8 and 8-bit optimizers",
    "lightning": "its rows of the tables",
    "accelerate": "its rows of the tables",
    "transformers": "its rows of the tables",
}

PROBE = """
import json, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": None}
if torch.cuda.is_available():
    found |= {"gpu": torch.cuda.get_device_name(), "count": torch.cuda.device_count()}
    found |= {"capability": list(torch.cuda.get_device_capability())}
    found |= {"memory": torch.cuda.get_device_properties(0).total_memory}
print(json.dumps(found))
"""


@dataclass
class Part:
    """A part of the run."""

    name: str  # also of the file with its output
    command: list[str]
    seconds: float  # what it may take at least
    needs: tuple[str, ...] = ("numpy", "xxhash")  # packages without which it is skipped
    end: str = ""  # the option that tells its program when it is ended; "" if it takes none
    outcome: str = ""  # "passed", "failed", "ran out of time" or "skipped"
    code: int | None = None
    begun: str = ""  # the time, UTC
    took: float = 0.0
    reason: str = ""  # why it was skipped, or how it failed
    tests: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def parts(directory: Path, size: str = "full", only: list[str] | None = None) -> list[Part]:
    """Return what is run, in this order."""
    # Without the budget of CPU seconds, which is for tests on CPUs.
    options = ["-m", "gpu", "-v", "-rs", "-p", "no:cacheprovider", "-p", "no:gate", "-W", "default"]
    pytest = [sys.executable, "-m", "pytest", *options]
    found: list[Part] = []
    for name, seconds, _, is_test in PLAN:
        if only is not None and name not in only:
            continue
        if is_test:
            command = [*pytest, f"--junitxml={directory / name}.xml", f"tests/gpu/test_{name}.py"]
            found.append(Part(name, command, seconds, ("pytest", "numpy", "xxhash")))
            continue
        rows = ["--size", size, "--rows", str(directory / "rows.jsonl")]
        found.append(Part(name, [sys.executable, "-m", "gpu", name, *rows], seconds, end="--until"))
    return found


def now() -> str:  # UTC
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())


def earlier(directory: Path, device: dict[str, Any], size: str, only: list[str]) -> list[dict[str, Any]]:
    file = directory / "gpu.json"
    report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if (report.get("device"), report.get("size")) != (device, size):
        return []
    return [part for part in report["parts"] if part["name"] not in only]


def missing(names: dict[str, str]) -> dict[str, str]:
    return {name: use for name, use in names.items() if importlib.util.find_spec(name) is None}


def installed() -> dict[str, str]:  # the versions of what is installed
    found = {}
    for name in ("torch", *CORE, *EXTRAS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def probe() -> tuple[dict[str, Any], str]:
    """Ask torch for the GPU, in a process of its own; returns its answer, and why nothing can run."""
    if sys.version_info < (3, 11):  # noqa: UP036  whoever runs this has installed nothing
        return {}, f"Python is {platform.python_version()}; 3.11 or newer is needed"
    if importlib.util.find_spec("torch") is None:
        return {}, f"{sys.executable} has no torch; name the Python that has it: make gpu PYTHON=..."
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, "torch has not found out within 60 seconds whether there is a GPU"
    if done.returncode:
        return {}, f"torch does not load: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    found = json.loads(done.stdout.splitlines()[-1])
    if tuple(int(each) for each in found["torch"].split(".")[:2]) < (2, 9):
        return found, f"torch is {found['torch']}; 2.9 or newer is needed"
    if found["gpu"] is None:
        return found, "torch sees no NVIDIA GPU (torch.cuda.is_available() is False)"
    return found, ""


def run(part: Part, directory: Path, limit: float) -> None:
    """Run a part within a limit in seconds, of which 0 is none left, and note what came of it."""
    lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if lacking:
        part.outcome, part.reason = "skipped", f"not installed: {', '.join(lacking)}"
        return
    if limit <= 0:
        part.outcome, part.reason = "skipped", "the time of all parts is over"
        return
    command = part.command + ([part.end, f"{time.time() + limit:.1f}"] if part.end else [])
    part.begun, begun = now(), time.monotonic()
    log = directory / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        options: Any = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        process = subprocess.Popen(command, **streams, **options)
        try:
            part.code = process.wait(limit)
            part.outcome = "passed" if part.code == 0 else "failed"
            part.reason = "" if part.code == 0 else f"exit code {part.code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # pytest then writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            part.code = process.wait()
            part.outcome, part.reason = "ran out of time", f"it took longer than {limit:.0f} s and was ended"
    part.took = time.monotonic() - begun
    results = directory / f"{part.name}.xml"
    if results.exists():
        part.tests = read_tests(results)
        results.unlink()
    part.rows = read_rows(directory / "rows.jsonl", part.name)


def environment() -> dict[str, str]:
    """Return a part's variables: our packages before those of PYTHONPATH, and no number of threads."""
    paths = [str(ROOT / "package"), str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    found = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    return {**found, "TORCHINDUCTOR_CACHE_DIR": str(COMPILED)}


def read_rows(file: Path, part: str) -> list[dict[str, Any]]:
    """Return a part's rows; a line that was being written when its process was ended is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["part"] == part:
            found.append(row)
    return found


def read_tests(results: Path) -> list[dict[str, Any]]:
    """The tests of a JUnit file: name, outcome, seconds, and the reason of what did not pass."""
    found = []
    for case in ElementTree.parse(results).iter("testcase"):
        said = [each for each in case if each.tag in ("failure", "error", "skipped")]
        outcome = "passed" if not said else "skipped" if said[0].tag == "skipped" else "failed"
        lines = (said[0].get("message") or "").splitlines() if said else []
        reason = lines[0][:300] if lines else ""
        row = {"name": f"{case.get('name')}", "outcome": outcome, "reason": reason}
        found.append({**row, "seconds": float(case.get("time") or 0)})
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, write the report and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: to try the program")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds; {LIMIT:.0f} if not given")
    only = "these parts; the others stay as they are in the report, if there is one of this GPU"
    parser.add_argument("--only", nargs="+", choices=[each.name for each in PLAN], help=only)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    directory = Path(os.environ.get("OUT") or ROOT / "gpu-report").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rows.jsonl").unlink(missing_ok=True)  # the report has those of earlier parts
    device, refused = probe()
    if options.size == "small" and "torch" in device:
        refused = ""
    report: dict[str, Any] = {
        "begun": now(),
        "size": options.size,
        "python": platform.python_version(),
        "device": device,
        "installed": installed(),
        "missing": missing({**CORE, **EXTRAS}),
        "refused": refused,
        "seconds": 0.0,
        "parts": earlier(directory, device, options.size, options.only) if options.only else [],
    }
    for name, use in report["missing"].items():
        say(f"not installed: {name}; {use} will be skipped")
    whole = options.limit * (4 if options.size == "small" else 1)  # for machines that have other work
    waiting = [] if refused else parts(directory, options.size, options.only)
    for each in waiting:
        each.seconds *= options.limit / LIMIT
    while waiting:
        part = waiting.pop(0)
        left = whole - 5 - (time.monotonic() - begun)
        limit = max(part.seconds, left - sum(each.seconds for each in waiting))
        limit = min(left, limit) if left > 10 else 0.0
        say(f"{part.name}, at most {limit:.0f} s ...")
        run(part, directory, limit)
        say(f"{part.name}: {part.outcome} {part.reason}, {part.took:.0f} s")
        report["parts"].append(asdict(part))
        write(report, directory)
    made = write(report, directory)
    shutil.rmtree(COMPILED, ignore_errors=True)
    say(f"\n{made}\nThe report is in {directory}")
    if refused:
        say(f"make gpu: {refused}. Nothing was run")
        return 2
    return int(any(part["outcome"] in ("failed", "ran out of time") for part in report["parts"]))


def write(report: dict[str, Any], directory: Path) -> str:
    order = [each.name for each in PLAN]
    report["parts"].sort(key=lambda part: order.index(part["name"]))
    report["seconds"] = round(sum(part["took"] for part in report["parts"]), 1)
    (directory / "gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    made = page(report)
    (directory / "gpu.md").write_text(made, encoding="utf-8")
    return made


def say(text: str) -> None:  # print a line at once
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
