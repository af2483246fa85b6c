"""The examples are run as a reader would run them: each in a process of its own, in an empty directory."""

import ast
import importlib.util
import os
import re
import signal
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
        timeout=3600,
        check=False,
    )
    last = "\n".join(finished.stdout.splitlines()[-40:])
    assert finished.returncode == 0, last
    assert "Warning" not in finished.stdout, last
    return finished.stdout


def found(pattern: str, text: str) -> re.Match[str]:  # the only place where the pattern matches
    matches = list(re.finditer(pattern, text))
    assert len(matches) == 1, f"{pattern!r} matches {len(matches)} times in:\n{text}"
    return matches[0]


def class_source(text: str, name: str) -> str:  # the lines of a class, as they are written
    (node,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == name)
    return "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


@pytest.mark.landing
def test_digits_of_make_demo_reaches_97_percent_resumes_and_names_its_files(tmp_path: Path) -> None:
    earlier = tmp_path / "runs" / "digits"
    earlier.mkdir(parents=True)
    (earlier / "mine.txt").write_text("of an earlier run", encoding="utf-8")
    printed = run(EXAMPLES / "digits.py", cwd=tmp_path)
    assert float(found(r"test accuracy (\S+)%", printed)[1]) >= 97
    predicted = ast.literal_eval(found(r"(?m)^predicted (\[.*\])$", printed)[1])
    true = ast.literal_eval(found(r"(?m)^true +(\[.*\])$", printed)[1])
    assert len(predicted) == len(true) == 20
    assert sum(p == t for p, t in zip(predicted, true, strict=True)) >= 18
    parts = found(r"(?s)== train, and stop half way(.*)== resume(.*)== test", printed).groups()
    first, second = ([int(each) for each in re.findall(r"step (\d+)/", part)] for part in parts)
    assert first[-1] < second[0] <= first[-1] + 50, "the second fit begins where the first ended"
    run_dir = tmp_path / found(r"(?m)^== files in (.+)$", printed)[1]
    assert run_dir == tmp_path / "runs" / "digits-2"
    named = re.findall(r"(?m)^ *([\d,]+)  (\S+)$", printed)
    made = {str(p.relative_to(run_dir)): p.stat().st_size for p in run_dir.rglob("*") if p.is_file()}
    assert {name: int(size.replace(",", "")) for size, name in named} == made
    kinds = (r"model\.safetensors", r"metrics\.csv", r"events\.out\..*", r"checkpoints/.*/manifest\.json")
    for kind in kinds:
        assert any(re.fullmatch(kind, name) for name in made), kind
    assert [path.name for path in earlier.iterdir()] == ["mine.txt"]


def test_what_the_examples_and_the_readme_state() -> None:
    shown = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"))
    (shown,) = (block for block in shown if "class Digits" in block)
    example = (EXAMPLES / "digits.py").read_text(encoding="utf-8")
    assert class_source(shown, "Digits") == class_source(example, "Digits")
    gan = class_source((EXAMPLES / "gan.py").read_text(encoding="utf-8"), "RingGAN")
    assert len(gan.splitlines()) < 40
    described = ast.get_docstring(ast.parse((EXAMPLES / "gpt.py").read_text(encoding="utf-8"))) or ""
    stated = re.findall(r"(\d\.\d+)\s+bits\s+per\s+byte", described)  # what two minutes reach
    assert stated
    assert all(1 < float(each) < 4 for each in stated)


def test_each_program_takes_a_strategy_devices_and_a_precision() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in ("strategy", "devices", "precision"):
            assert re.search(rf'add_argument\("--{name}"', text), f"{path.name}: --{name}"
            used = re.search(rf'\b{name}"?[=:] ?(given|options)\.{name}\b', text)
            assert used, f"{path.name} ignores --{name}"


@pytest.mark.nightly
def test_the_gan_learns_the_modes_and_writes_no_files(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "gan.py", "--steps", 1000, cwd=tmp_path)
    reports = re.findall(r"(\w+) training: (\S+)% .* (\d) of 8 modes", printed)
    assert [when for when, _, _ in reports] == ["before", "after"]
    (_, before, _), (_, after, modes) = reports
    # One that knows the circle, but not the modes on it, has 51 % of its samples near a mode.
    assert float(before) < 10
    assert float(after) >= 58
    assert int(modes) >= 6
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_gpt_trains_and_samples(tmp_path: Path) -> None:
    tiny = "--minutes 60 --steps 40 --megabytes 0.3 --width 32 --sample 30 --run-dir run --strategy ddp"
    printed = run(EXAMPLES / "gpt.py", *tiny.split(), "--precision", "bf16-mixed", cwd=tmp_path)
    assert "strategy ddp | precision bf16-mixed" in printed
    perplexity, bits = map(float, found(r"perplexity (\S+), (\S+) bits per byte", printed).groups())
    assert bits < 6, "an untrained model needs 8 bits for a byte"
    assert perplexity == pytest.approx(2**bits, rel=1e-3)
    assert "max_steps=40 reached" in printed
    assert "\ndef " in printed


@pytest.mark.nightly
def test_a_killed_pretraining_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    tiny = ["--tokens", "131_072", "--megabytes", "0.2", "--width", "32", "--save-every", "4"]
    program = [EXAMPLES / "pretrain.py", *tiny]
    whole = run(*program, "--devices", 1, cwd=tmp_path)
    two = [sys.executable, *program, "--run-dir", "run", "--strategy", "ddp", "--devices", "2"]
    process = subprocess.Popen(
        two, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert any("| step 10 " in line for line in process.stdout)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    resumed = run(*program, "--run-dir", "run", "--devices", 1, cwd=tmp_path)
    assert re.search(r"goes on from \S*step-0000000[48]", resumed)
    ends = [found(r"(\S+ tokens in \d+ steps)\ntraining loss (\S+)", each) for each in (whole, resumed)]
    assert ends[0][1] == ends[1][1] == "131,072 tokens in 16 steps"
    assert float(ends[0][2]) == pytest.approx(float(ends[1][2]), abs=2e-4)


RESUMED = """
import sys
from pathlib import Path
from native_loop import train
train(Path(sys.argv[1]), until=4, resume=train(Path(sys.argv[1]), until=2))
train(Path(sys.argv[2]), until=4)
"""


@pytest.mark.nightly
def test_the_native_loop_resumes_from_its_checkpoint_with_the_same_weights(tmp_path: Path) -> None:
    printed = run(EXAMPLES / "native_loop.py", "--epochs", 10, cwd=tmp_path)
    first, second = (float(each) for each in re.findall(r"test accuracy (\S+)%", printed))
    assert found(r"resumed at epoch (\d+), step (\d+)", printed).groups() == ("5", "190")
    assert second > first > 60
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    run("-c", RESUMED, resumed, whole, cwd=EXAMPLES)
    weights = [(each / "epoch-4" / "model.safetensors").read_bytes() for each in (resumed, whole)]
    assert weights[0] == weights[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    [
        "sft",
        "dpo --strategy fsdp --devices 2",
        "grpo --strategy ddp --devices 2",
        "digits_flow",
        "mixture_of_experts --expert-parallel --devices 2 --megabytes 0.2",
    ],
    ids=lambda command: command.split()[0],
)
def test_an_example_that_is_killed_goes_on_with_the_same_numbers(command: str, tmp_path: Path) -> None:
    name, *options = command.split()
    program = [EXAMPLES / f"{name}.py", "--run-dir", "run", *options]
    printed = run("-m", "drivetrain", "check-resume", "--steps", "6", *program, cwd=tmp_path)
    assert "the runs are identical to the last bit" in printed


FLOW = """
import torch
from digits_flow import Flow
from flow_matching.path import CondOTProbPath
task, label = Flow(), torch.arange(8)
image, noise, time = torch.randn(8, 64), torch.randn(8, 64), torch.rand(8)
theirs = CondOTProbPath().sample(t=time, x_0=noise, x_1=image)
loss = (task(theirs.x_t, time, label) - theirs.dx_t).square().mean()
print("the same:", torch.allclose(loss, task.velocity_loss(image, noise, time, label), rtol=1e-6))
"""


@pytest.mark.nightly
@pytest.mark.skipif(
    importlib.util.find_spec("flow_matching") is None, reason="flow_matching is not installed"
)
def test_the_flow_has_the_loss_of_the_package_flow_matching() -> None:
    assert "the same: True" in run("-c", FLOW, cwd=EXAMPLES)
