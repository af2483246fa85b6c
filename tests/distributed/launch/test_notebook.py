"""A notebook trains in several processes as often as it likes, and finds the results in its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.running import PROGRAMS
from tests.support.failing import undisturbed

pytestmark = [
    pytest.mark.skipif(
        not torch.distributed.is_gloo_available() or sys.platform != "linux",
        reason="needs gloo and a safe fork",
    ),
    pytest.mark.landing,
    pytest.mark.real("a notebook's kernel forks ranks"),
]
CELLS = [
    'found(run_dir="runs/alone", gradient_accumulation_steps=2)',
    'found(run_dir="runs/1", strategy="ddp", devices=2)',
    'found(run_dir="runs/2", strategy="ddp", devices=2)',
    'found(run_dir="runs/3", strategy="fsdp", devices=2)',
]


def executed(cells: list[str]) -> list[list[dict[str, str]]]:
    """What the cells of a notebook give, in a kernel of their own."""
    here = {name: str(Path.cwd() / name) for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "notebook.py")],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=900,
        env={**undisturbed(), **here},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[list[dict[str, str]]] = json.loads(done.stdout)
    # transformers, which torchmetrics loads where it is installed, has tqdm warn that ipywidgets is not.
    return [[each for each in cell if "ipywidgets" not in each.get("text", "")] for cell in outputs]


def test_each_training_of_a_notebook_gives_what_one_process_gives() -> None:
    nothing, *outputs = executed([(PROGRAMS / "cells.py").read_text(encoding="utf-8"), *CELLS])
    assert nothing == []
    texts = [[each["text"] for each in output] for output in outputs]
    assert [len(each) for each in texts] == [1] * len(CELLS), (
        "the other ranks print nothing, and nobody warns"
    )
    values, weights = json.loads(texts[0][0])
    assert values["updates"] == 8
    assert {"train/loss", "train/error", "validation/loss", "validation/error"} <= values.keys()
    for cell, text in zip(CELLS[1:], texts[1:], strict=True):
        its_values, its_weights = json.loads(text[0])
        assert its_values == pytest.approx(values, rel=1e-6), cell
        assert its_weights.keys() == weights.keys()
        for name, value in its_weights.items():
            assert value == pytest.approx(weights[name], rel=1e-6, abs=1e-7), (cell, name)
