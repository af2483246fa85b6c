"""The examples with models of transformers learn something, in few updates, and write no files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = {
    "classify_text": 100,
    "causal_lm": 60,
    "translate": 120,
    "tag_tokens": 60,
    "classify_images": 200,
    "recognise_speech": 400,
    "lora": 60,
}
PROGRAM = """
import runpy, sys
for number in range(2, len(sys.argv), 2):
    name, steps = sys.argv[number : number + 2]
    print("== " + name, flush=True)
    given, sys.argv = sys.argv, [name, "--steps", steps]
    runpy.run_path(f"{given[1]}/{name}.py", run_name="__main__")
    sys.argv = given
"""

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example printed; they share a process, because its imports take longer than an example."""
    folder = tmp_path_factory.mktemp("examples")
    given = [text for name, steps in STEPS.items() for text in (name, str(steps))]
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES), *given],
        cwd=folder,
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(folder.iterdir())
    parts = re.split(r"== (\w+)\n", done.stdout)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers of the only place where the pattern matches."""
    matches = re.findall(pattern, text)
    assert len(matches) == 1, f"{pattern!r} matches {len(matches)} times in:\n{text}"
    return [float(each) for each in (matches[0] if isinstance(matches[0], tuple) else matches)]


def test_docstrings_are_told_apart(printed: dict[str, str]) -> None:
    found, largest = numbers(r"others (\S+)%, the largest part is (\S+)%", printed["classify_text"])
    assert found > largest + 10


def test_a_language_model_learns_and_generates(printed: dict[str, str]) -> None:
    before, after = numbers(r"before (\S+), after (\S+)", printed["causal_lm"])
    assert after < before / 2
    assert "Return the" in printed["causal_lm"]


def test_syllables_are_translated(printed: dict[str, str]) -> None:
    assert numbers(r"1,000 syllables: (\S+)%", printed["translate"])[0] > 50


def test_words_are_tagged(printed: dict[str, str]) -> None:
    right, most = numbers(r"lines: (\S+)% right; the most frequent tag is (\S+)%", printed["tag_tokens"])
    assert right > most + 20


def test_images_are_classified(printed: dict[str, str]) -> None:
    assert numbers(r"accuracy on 300 other digits: (\S+)%", printed["classify_images"])[0] > 50


# A guess is right once in 10,000 times.
def test_telephone_numbers_are_recognised(printed: dict[str, str]) -> None:
    assert numbers(r"whole numbers right: (\S+)% of 200", printed["recognise_speech"])[0] > 5


def test_adapters_adapt_a_model_by_few_parameters(printed: dict[str, str]) -> None:
    share, before, after = numbers(
        r"parameters \((\S+)%\)\nloss on code before (\S+), after (\S+) nats", printed["lora"]
    )
    assert share < 10
    assert after < before - 0.1


def test_each_example_is_short() -> None:
    for name in STEPS:
        assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80, name
