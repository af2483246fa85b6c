"""The examples are run as a reader would run them: each in a process of its own, in an empty directory."""

from __future__ import annotations

import ast
import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(*command: object, cwd: Path) -> str:
    """What a terminal would show of Python with these arguments, which must end well and warn of nothing."""
    settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    finished = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # progress goes there, and its place among the rest is looked at
        encoding="utf-8",
        timeout=180,
        check=False,
    )
    printed = finished.stdout
    last = "\n".join(printed.splitlines()[-40:])
    assert finished.returncode == 0, last
    assert "Warning" not in printed, last
    return printed


def found(pattern: str, text: str) -> re.Match[str]:
    """The only place where the pattern matches."""
    matches = list(re.finditer(pattern, text))
    assert len(matches) == 1, f"{pattern!r} matches {len(matches)} times in:\n{text}"
    return matches[0]


def class_source(text: str, name: str) -> str:
    """The lines of a class, as they are written."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
    raise AssertionError(f"no class {name}")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The digits example, run in full: where, and what it printed."""
    directory = tmp_path_factory.mktemp("digits")
    (directory / "runs" / "digits").mkdir(parents=True)
    (directory / "runs" / "digits" / "mine.txt").write_text("of an earlier run", encoding="utf-8")
    return directory, run(EXAMPLES / "digits.py", cwd=directory)


def test_digits_reaches_97_percent_and_predicts_what_it_says(digits: tuple[Path, str]) -> None:
    printed = digits[1]
    assert float(found(r"test accuracy (\S+)%", printed)[1]) >= 97
    predicted = ast.literal_eval(found(r"(?m)^predicted (\[.*\])$", printed)[1])
    true = ast.literal_eval(found(r"(?m)^true +(\[.*\])$", printed)[1])
    assert len(predicted) == len(true) == 20
    assert sum(p == t for p, t in zip(predicted, true, strict=True)) >= 18


def test_digits_goes_on_from_its_checkpoint(digits: tuple[Path, str]) -> None:
    first, second = found(r"(?s)== train, and stop half way(.*)== resume(.*)== test", digits[1]).groups()
    updates = [[int(u) for u in re.findall(r"update (\d+)/", part)] for part in (first, second)]
    assert updates[0][-1] < updates[1][0] <= updates[0][-1] + 50, (
        "the second fit begins where the first ended"
    )


def test_digits_names_the_files_that_it_made_and_leaves_earlier_ones_alone(digits: tuple[Path, str]) -> None:
    directory, printed = digits
    run_dir = directory / found(r"(?m)^== files in (.+)$", printed)[1]
    assert run_dir == directory / "runs" / "digits-2"
    named = {
        name: int(size.replace(",", "")) for size, name in re.findall(r"(?m)^ *([\d,]+)  (\S+)$", printed)
    }
    made = {str(p.relative_to(run_dir)): p.stat().st_size for p in run_dir.rglob("*") if p.is_file()}
    assert named == made
    for kind in (
        r"model\.safetensors",
        r"metrics\.csv",
        r"events\.out\.tfevents.*",
        r"checkpoints/.*/manifest\.json",
    ):
        assert any(re.fullmatch(kind, name) for name in named), kind
    assert [p.name for p in (directory / "runs" / "digits").iterdir()] == ["mine.txt"]


@pytest.mark.full
def test_digits_can_be_fitted_from_the_command_line(tmp_path: Path) -> None:
    words = "-m drivetrain fit --task digits.Digits --data digits.data --trainer.max_epochs 2"
    run(*words.split(), "--trainer.run_dir", tmp_path / "run", cwd=EXAMPLES)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_the_readme_shows_the_task_of_the_digits_example() -> None:
    blocks = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"))
    shown = [block for block in blocks if "class Digits" in block]
    assert len(shown) == 1, "README.md has one code block with `class Digits`"
    example = (EXAMPLES / "digits.py").read_text(encoding="utf-8")
    assert class_source(shown[0], "Digits") == class_source(example, "Digits")


def test_the_gan_is_a_task_of_fewer_than_40_lines() -> None:
    example = (EXAMPLES / "gan.py").read_text(encoding="utf-8")
    assert len(class_source(example, "RingGAN").splitlines()) < 40


@pytest.mark.full
def test_the_gan_learns_the_modes_and_writes_no_files(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "gan.py", "--steps", 1000, cwd=tmp_path)
    reports = re.findall(r"(\w+) training: (\S+)% .* (\d) of 8 modes", printed)
    assert [when for when, _, _ in reports] == ["before", "after"]
    (_, before, _), (_, after, modes) = reports
    assert float(before) < 10
    # One that knows the circle, but not the modes on it, has 51 % of its samples near a mode.
    assert float(after) >= 58
    assert int(modes) >= 6
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_the_gpt_trains_reports_its_units_and_samples(tmp_path: Path) -> None:
    tiny = "--minutes 5 --steps 40 --megabytes 0.3 --width 32 --sample 30 --run-dir run"
    printed = run(EXAMPLES / "gpt.py", *tiny.split(), cwd=tmp_path)
    perplexity, bits = map(float, found(r"perplexity (\S+), (\S+) bits per byte", printed).groups())
    assert bits < 6, "an untrained model needs 8 bits for a byte"
    assert perplexity == pytest.approx(2**bits, rel=1e-3)
    assert "max_steps=40 reached" in printed
    assert "\ndef " in printed
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    last = {name: value for row in rows for name, value in row.items() if value}
    assert float(last["validation/bits_per_byte"]) == pytest.approx(
        math.log2(float(last["validation/perplexity"]))
    )
    assert float(last["throughput/tokens_per_second"]) > 0
    rates = [float(row["lr"]) for row in rows if row["lr"]]
    assert rates[0] < max(rates), "the rate warms up"
    assert rates[-1] < 0.1 * max(rates), "and falls to nothing by the end"


def test_the_gpt_states_what_two_minutes_reach() -> None:
    described = ast.get_docstring(ast.parse((EXAMPLES / "gpt.py").read_text(encoding="utf-8")))
    stated = re.findall(r"(\d\.\d+)\s+bits\s+per\s+byte", described or "")
    assert stated, "the docstring of gpt.py states no bits per byte"
    assert all(1 < float(each) < 4 for each in stated)


@pytest.mark.full
def test_the_loop_of_ones_own_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "native_loop.py", "--epochs", 10, cwd=tmp_path)
    first, second = (float(each) for each in re.findall(r"test accuracy (\S+)%", printed))
    assert found(r"resumed at epoch (\d+), update (\d+)", printed).groups() == ("5", "190")
    assert second > first > 60


@pytest.mark.full
def test_the_loop_of_ones_own_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from native_loop import train
train(Path(sys.argv[1]), until=4, resume=train(Path(sys.argv[1]), until=2))
train(Path(sys.argv[2]), until=4)
"""
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    run("-c", program, resumed, whole, cwd=EXAMPLES)
    weights = [(each / "epoch-4" / "model.safetensors").read_bytes() for each in (resumed, whole)]
    assert weights[0] == weights[1]
