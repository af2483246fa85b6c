"""`make gpu` says what is missing, keeps its time limits, and reports what it has found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.gpu import run as runner
from tests.gpu.run import Part, markdown, parts, run

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


def test_part_is_skipped_without_its_packages_and_ended_at_its_limit(tmp_path: Path) -> None:
    part = Part("tests", [sys.executable, "-c", "1 / 0"], 30.0, ("pytest", "no_such_package"))
    run(part, tmp_path, 100.0)
    assert (part.outcome, part.reason) == ("skipped", "not installed: no_such_package")
    slow = Part("slow", [sys.executable, "-c", "import time; time.sleep(600)"], 0.1)
    run(slow, tmp_path, 100.0)
    assert slow.outcome == "ran out of time"
    late = Part("late", [sys.executable, "-c", "pass"], 10.0)
    run(late, tmp_path, 3.0)
    assert late.reason == "the 480 seconds of all parts are over"


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
    assert part.outcome == "failed"
    assert [each["outcome"] for each in part.tests] == ["passed", "failed", "skipped"]
    report = {"refused": "", "device": {}, "installed": {"torch": "2.9"}, "missing": {"tqdm": "bars"}}
    page = markdown(report, [part])
    for line in (
        "| three | failed: exit code 1 |",
        "- failed: `test_bad`: AssertionError: not so",
        "- skipped: `test_later`: needs more",
        "- Not installed: `tqdm`, for bars.",
    ):
        assert line in page


def test_limits_of_all_parts_fit_into_the_whole(tmp_path: Path) -> None:
    assert sum(part.seconds for part in parts(tmp_path)) + 30 <= runner.LIMIT <= 480
    named = {word for part in parts(tmp_path) for word in part.command if word.endswith(".py")}
    assert all((ROOT / each).is_file() for each in named)
    tests = {f"tests/gpu/{each.name}" for each in Path(__file__).parent.glob("test_*.py")}
    assert tests - named == {"tests/gpu/test_run.py"}
