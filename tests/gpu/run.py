"""Run everything that can use an NVIDIA GPU, and report it: `make gpu`, or `python tests/gpu/run.py`.

Nothing is installed: this runs with the Python and the torch of the machine, and names and skips what is
missing. Each part has a time limit; all of it takes at most 8 minutes. The report is in the folder that the
variable OUT names, or in gpu-report: gpu.md and gpu.json, and the output of each part.

The exit code is 0 where every part passed, 1 where one failed, and 2 where there is no GPU to run on.
"""

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 480.0
"""Seconds for everything."""

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

EXTRAS = {"pytest": "the tests", "triton": "compilation", "torchao": "fp8 and 8-bit optimizers"}

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
    """A part of the run.

    Attributes:
        name: Also of the file with its output.
        command: What is run.
        seconds: Its time limit.
        needs: Packages without which it is skipped.
        outcome: "passed", "failed", "ran out of time" or "skipped".
        took: Seconds.
        reason: Why it was skipped, or how it failed.
        tests: What each test gave, where there are tests.
        table: What it has measured, as Markdown.
        data: The same as data.
    """

    name: str
    command: list[str]
    seconds: float
    needs: tuple[str, ...] = ()
    outcome: str = ""
    took: float = 0.0
    reason: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)
    table: str = ""
    data: Any = None


def parts(directory: Path) -> list[Part]:
    """What is run, in this order."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", "-W", "default"]
    found: list[Part] = []
    for name, seconds in (("training", 150.0), ("precisions", 90.0)):
        report = f"--junitxml={directory / name}.xml"
        command = [*pytest, report, f"tests/gpu/test_{name}.py"]
        found.append(Part(name, command, seconds, ("pytest", "numpy", "xxhash")))
    measure = [sys.executable, "benchmarks/gpu.py", "--output", str(directory / "benchmark.json")]
    return [*found, Part("benchmark", measure, 200.0, ("numpy", "xxhash"))]


def missing(names: dict[str, str]) -> dict[str, str]:
    """Those that are not installed, and what goes without them."""
    return {name: use for name, use in names.items() if importlib.util.find_spec(name) is None}


def installed() -> dict[str, str]:
    """The versions of what is installed."""
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


def run(part: Part, directory: Path, left: float) -> None:
    """Run a part within its time limit, and note what came of it."""
    lacking = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if lacking:
        part.outcome, part.reason = "skipped", f"not installed: {', '.join(lacking)}"
        return
    limit = min(part.seconds, left)
    if left < 10:
        part.outcome, part.reason = "skipped", f"the {LIMIT:.0f} seconds of all parts are over"
        return
    paths = [str(ROOT / "package"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    begun = time.monotonic()
    log = directory / f"{part.name}.log"
    with log.open("w", encoding="utf-8") as output:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        options: Any = {"cwd": ROOT, "env": environment, "start_new_session": True}
        process = subprocess.Popen(part.command, **streams, **options)
        try:
            code = process.wait(limit)
            part.outcome = "passed" if code == 0 else "failed"
            part.reason = "" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            part.outcome, part.reason = "ran out of time", f"it took longer than {limit:.0f} s and was ended"
    part.took = time.monotonic() - begun
    results = directory / f"{part.name}.xml"
    if results.exists():
        part.tests = read_tests(results)
        results.unlink()
    measured = directory / f"{part.name}.json"
    if measured.exists():
        part.data = json.loads(measured.read_text(encoding="utf-8"))
        part.table = part.data.pop("markdown", "")
        measured.unlink()


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


def markdown(report: dict[str, Any], done: list[Part]) -> str:
    """The report as a page."""
    device = report["device"]
    lines = ["# On a GPU", ""]
    if report["refused"]:
        lines += [f"Nothing was run: {report['refused']}.", ""]
    if device.get("gpu"):
        memory = device["memory"] / 2**30
        capability = ".".join(map(str, device["capability"]))
        told = f"{memory:.0f} GiB, compute capability {capability}, CUDA {device['cuda']}"
        lines += [f"{device['gpu']}, {told}.", ""]
    lines += [", ".join(f"{name} {each}" for name, each in report["installed"].items()) + ".", ""]
    lines += [f"- Not installed: `{name}`, for {use}." for name, use in report["missing"].items()] + [""]
    if done:
        lines += ["| part | outcome | seconds | tests passed | failed | skipped |"]
        lines += ["| --- | --- | ---: | ---: | ---: | ---: |"]
    for part in done:
        outcomes = [each["outcome"] for each in part.tests]
        counts = [outcomes.count(what) for what in ("passed", "failed", "skipped")]
        cells = [str(each) if part.tests else "" for each in counts]
        said = part.outcome + (f": {part.reason}" if part.reason else "")
        lines.append(f"| {part.name} | {said} | {part.took:.0f} | {' | '.join(cells)} |")
    for part in done:
        if part.table:
            lines += ["", part.table]
        others = [each for each in part.tests if each["outcome"] != "passed"]
        if others:
            lines += ["", f"## {part.name}: what did not pass", ""]
            lines += [f"- {each['outcome']}: `{each['name']}`: {each['reason']}" for each in others]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run all parts, write the report and return the exit code."""
    begun = time.monotonic()
    directory = Path(os.environ.get("OUT") or ROOT / "gpu-report").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    device, refused = probe()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "device": device,
        "installed": installed(),
        "missing": missing({**CORE, **EXTRAS}),
        "refused": refused,
    }
    for name, use in report["missing"].items():
        say(f"not installed: {name}; {use} will be skipped")
    done: list[Part] = []
    for part in [] if refused else parts(directory):
        say(f"{part.name}, at most {part.seconds:.0f} s ...")
        run(part, directory, LIMIT - (time.monotonic() - begun) - 5)
        say(f"{part.name}: {part.outcome} {part.reason}, {part.took:.0f} s")
        done.append(part)
    report["seconds"] = round(time.monotonic() - begun, 1)
    report["parts"] = [asdict(part) for part in done]
    (directory / "gpu.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    page = markdown(report, done)
    (directory / "gpu.md").write_text(page, encoding="utf-8")
    say(f"\n{page}\nThe report is in {directory}")
    if refused:
        say(f"make gpu: {refused}. Nothing was run")
        return 2
    return int(any(part.outcome in ("failed", "ran out of time") for part in done))


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
