"""Scripts like transformers' examples with one import changed, and the examples of this repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.transformers_scripts.compare import SCRIPTS, results

HERE = Path(__file__).parent
EXAMPLES, SCRIPT_FOLDER = (HERE.parents[2] / each for each in ("examples", "benchmarks/transformers_scripts"))


def ran(folder: Path, program: Path, *arguments: str) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = {"HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command, environment = [sys.executable, str(program), *arguments], {**os.environ, **offline, **paths}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.landing
def test_scripts_have_the_losses_metrics_and_files_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    ran(tmp_path, SCRIPT_FOLDER / "compare.py", str(folder))
    for name in SCRIPTS:
        theirs, ours = (results(each, name, folder) for each in ("transformers", "drivetrain"))
        assert len(ours["losses"]) == 22
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5), name
        assert ours["metric"] == pytest.approx(theirs["metric"], abs=1e-5), name
        # All but the pickle of the arguments.
        assert ours["files"] == theirs["files"]


STEPS = {"classify_text": (100, r"others (\S+)%, the largest part is (\S+)%")}
STEPS |= {"causal_lm": (60, r"before (\S+), after (\S+)"), "translate": (120, r"1,000 syllables: (\S+)%")}
STEPS |= {"tag_tokens": (60, r"lines: (\S+)% right; the most frequent tag is (\S+)%")}
STEPS |= {"classify_images": (200, r"accuracy on 300 other digits: (\S+)%")}
STEPS |= {"recognise_speech": (400, r"whole numbers right: (\S+)% of 200")}
STEPS |= {"lora": (60, r"parameters \((\S+)%\)\nloss on code before (\S+), after (\S+) nats")}


@pytest.mark.nightly
def test_examples_learn_something_and_write_no_files(tmp_path: Path) -> None:
    """They share a process, because its imports take longer than an example."""
    given = [text for name, (steps, _) in STEPS.items() for text in (name, str(steps))]
    folder = tmp_path / "work"
    folder.mkdir()
    printed = ran(folder, HERE / "programs" / "run_examples.py", str(EXAMPLES), *given)
    assert {each.name for each in folder.iterdir()} <= {"cache"}
    parts = re.split(r"== (\w+)\n", printed)[1:]
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    found = {}
    for name, (_, pattern) in STEPS.items():
        (match,) = re.findall(pattern, texts[name])
        found[name] = [float(each) for each in ([match] if isinstance(match, str) else match)]
    for name, least in (("translate", 50), ("classify_images", 50), ("recognise_speech", 5)):
        assert found[name][0] > least  # a guess of a spoken number is right once in 10,000 times
    for name, more in (("classify_text", 10), ("tag_tokens", 20)):
        assert found[name][0] > found[name][1] + more  # than the most frequent one
    assert found["causal_lm"][1] < found["causal_lm"][0] / 2
    assert "Return the" in texts["causal_lm"]
    share, before, after = found["lora"]
    assert share < 10
    assert after < before - 0.1
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 90 for name in STEPS)
