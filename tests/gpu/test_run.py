"""`make gpu` says what is missing, keeps its time limits, and reports what it has found."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.gpu import run as runner
from tests.gpu.run import Part, environment, page, parts, read_rows, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.landing
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_make_gpu_without_a_gpu_says_so_and_ends_with_2(tmp_path: Path) -> None:
    make = ["make", "--silent", "gpu", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "make gpu: torch sees no NVIDIA GPU" in done.stdout
    page = (tmp_path / "out" / "gpu.md").read_text(encoding="utf-8")
    assert "Nothing was run: torch sees no NVIDIA GPU" in page
    report = json.loads((tmp_path / "out" / "gpu.json").read_text(encoding="utf-8"))
    assert (report["device"]["gpu"], report["parts"]) == (None, [])


HIDDEN = """
import sys, importlib.machinery as machinery
original = machinery.PathFinder
class PathFinder(original):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = ("hypothesis", "jsonargparse", "docstring_parser", "torchao")
        return None if name.split(".")[0] in hidden else original.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(original)] = machinery.PathFinder = PathFinder
"""
"""Hides packages from a program that has the folder of this file in PYTHONPATH."""


@pytest.mark.nightly
def test_parts_run_at_a_small_size_as_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries' rows too, if they are installed; without what the machine of a GPU may lack."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "-p no:hypothesispytest"
    )  # which is still there, and would import it
    monkeypatch.setenv("OUT", str(tmp_path))
    assert runner.main(["--size", "small", "--only", "facts", "mlp", "precisions"]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [(part["outcome"], part["code"]) for part in report["parts"]] == [("passed", 0)] * 3
    assert [each["outcome"] for each in report["parts"][2]["tests"]].count("passed") >= 3
    assert "CPU seconds" not in (tmp_path / "precisions.log").read_text(encoding="utf-8"), "a budget for CPUs"
    turns = [row["contestant"] for row in report["parts"][1]["rows"] if row["kind"] == "turn"]
    left = [row["contestant"] for row in report["parts"][1]["rows"] if row["kind"] == "left out"]
    assert {"hand-written", "drivetrain"} <= set(turns)
    assert {*turns, *left} == {
        "hand-written",
        "drivetrain",
        "Lightning",
        "Accelerate",
        "transformers Trainer",
    }


def test_parts_get_packages_of_pythonpath_and_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    found = environment()
    assert "OMP_NUM_THREADS" not in found
    assert found["PYTHONPATH"].split(os.pathsep) == [
        f"{ROOT}/package",
        f"{ROOT}",
        f"{ROOT}/benchmarks",
        "/somewhere/else",
    ]
    make = ["make", "-n", "--no-print-directory", "gpu", "PYTHON=python"]
    said = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "python tests/gpu/run.py"


def test_part_is_skipped_without_its_packages_and_ended_at_its_limit(tmp_path: Path) -> None:
    part = Part("tests", [sys.executable, "-c", "1 / 0"], 30.0, ("pytest", "no_such_package"))
    run(part, tmp_path, 100.0)
    assert (part.outcome, part.reason) == ("skipped", "not installed: no_such_package")
    slow = Part("slow", ["sleep", "600"], 0.1)
    (tmp_path / "rows.jsonl").write_text('{"part": "slow", "kind": "fact"}\n{"part": "ot', encoding="utf-8")
    run(slow, tmp_path, 0.1)
    assert (slow.outcome, slow.code, slow.rows) == ("ran out of time", -2, [{"part": "slow", "kind": "fact"}])
    assert read_rows(tmp_path / "none.jsonl", "slow") == []
    late = Part("late", [sys.executable, "-c", "pass"], 10.0)
    run(late, tmp_path, 0.0)
    assert late.reason == "the time of all parts is over"


@pytest.mark.landing
def test_report_has_what_each_test_gave(tmp_path: Path) -> None:
    program = (
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'not so'\n"
        "@pytest.mark.skip(reason='needs more')\n"
        "def test_later(): pass\n"
    )
    (tmp_path / "test_three.py").write_text(program, encoding="utf-8")
    words = ["-p", "no:cacheprovider", "-c", os.devnull, f"--junitxml={tmp_path}/three.xml"]
    part = Part("three", [sys.executable, "-m", "pytest", *words, str(tmp_path / "test_three.py")], 300.0)
    run(part, tmp_path, 400.0)
    assert (part.outcome, part.code) == ("failed", 1)
    assert [each["outcome"] for each in part.tests] == ["passed", "failed", "skipped"]
    report = {"refused": "", "device": {}, "installed": {"torch": "2.9"}, "missing": {"tqdm": "bars"}}
    report |= {"size": "full", "begun": "2026-11-26T22:00:00", "python": "3.12", "seconds": 3.0}
    made = page({**report, "parts": [asdict(part)]})
    for line in (
        "| failed: exit code 1 | 1 |",
        "- failed: `test_bad`: AssertionError: not so",
        "- skipped: `test_later`: needs more",
        "- Not installed: `tqdm`, for bars.",
    ):
        assert line in made


def test_parts_that_run_again_complete_the_report(tmp_path: Path) -> None:
    device = {"gpu": "H100"}
    kept = [{"name": "mlp", "took": 3.0}, {"name": "fp8", "took": 2.0}]
    report = {"device": device, "size": "full", "parts": kept}
    (tmp_path / "gpu.json").write_text(json.dumps(report), encoding="utf-8")
    assert runner.earlier(tmp_path, device, "full", ["fp8"]) == kept[:1]
    for other in (({"gpu": "H200"}, "full"), (device, "small")):
        assert runner.earlier(tmp_path, *other, ["fp8"]) == []
    assert runner.earlier(tmp_path / "none", device, "full", ["fp8"]) == []


def test_limits_of_all_parts_fit_into_the_whole(tmp_path: Path) -> None:
    assert sum(part.seconds for part in parts(tmp_path)) + 5 <= runner.LIMIT <= 480
    named = {word for part in parts(tmp_path) for word in part.command if word.endswith(".py")}
    assert all((ROOT / each).is_file() for each in named)
    tests = {f"tests/gpu/{each.name}" for each in Path(__file__).parent.glob("test_*.py")}
    assert tests - named == {"tests/gpu/test_run.py"}
