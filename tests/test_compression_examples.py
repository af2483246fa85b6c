"""The examples of distillation, pruning and quantisation run, resume, and agree on two ranks."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Callback, LambdaCallback, TaskModule, Trainer
from drivetrain.testing import run_distributed

EXAMPLES = Path(__file__).parents[1] / "examples"
QUIET: dict[str, Any] = {"loggers": (), "progress_bar": False}


def printed(name: str, *arguments: object) -> str:  # in a process of its own
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracies(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"test accuracy (\S+)%", text)]


@pytest.fixture(scope="module", autouse=True)
def environment_is_set() -> None:
    """The first imports of scikit-learn and torchao set variables in it, which is no leak of a test."""
    importlib.import_module("sklearn")
    importlib.import_module("torchao.quantization.qat")


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    names = ("digits", "distill", "prune", "quantize")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in names:
        sys.modules.pop(name, None)


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.mark.nightly
def test_the_figures_of_the_guides_hold() -> None:
    teacher, alone, distilled, _ = accuracies(printed("distill.py"))
    assert teacher > 94
    assert distilled > alone + 1
    dense, pruned, _ = accuracies(printed("prune.py"))
    assert pruned > dense - 6
    floats, rounded, aware, *_ = accuracies(printed("quantize.py"))
    assert rounded < 75
    assert aware > floats - 3


# The strategies, and a resume.


def task_of(kind: str, teacher: str = "") -> tuple[TaskModule, list[Callback]]:
    torch.manual_seed(0)
    if kind == "distill":
        return example("distill").Distilled(teacher, hidden=16), []
    if kind == "prune":
        return example("prune").Pruned(16), [example("prune").GradualPruning(start=2, until=10, every=2)]
    quantize = example("quantize")
    task = example("digits").Digits(16)
    scheme = quantize.IntxWeightOnlyConfig(torch.int2, quantize.PerAxis(0))
    quantize.quantize_(task, quantize.QATConfig(scheme, step="prepare"))
    return task, []


def trained(kind: str, strategy: str, batch_size: int, steps: int, teacher: str = "") -> dict[str, Any]:
    task, callbacks = task_of(kind, teacher)
    part = example("digits").DigitsData().parts[1]
    found: dict[str, Any] = {}  # the whole weights and buffers

    def keep(run: Any) -> None:
        found.update({name: each.numpy().copy() for name, each in run.full_state_dict().items()})

    callbacks.append(LambdaCallback(on_fit_end=keep))
    devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    options = {"strategy": strategy, "devices": devices, "callbacks": callbacks, "checkpoint": False, **QUIET}
    Trainer(max_steps=steps, **options).fit(task, DataLoader(part, batch_size=batch_size))
    return found


@pytest.fixture
def teacher(tmp_path: Path, examples: None) -> str:  # the run of a teacher
    torch.manual_seed(1)
    part = example("digits").DigitsData().parts[1]
    trainer = Trainer(max_epochs=1, run_dir=tmp_path / "teacher", **QUIET)
    trainer.fit(example("digits").Digits(32), DataLoader(part, batch_size=50))
    return str(tmp_path / "teacher")


# Rounding is no continuous function: after some steps the last bit of a weight may decide a whole step.
STEPS = {"distill": 10, "prune": 10, "quantize": 3}


@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero3"])
@pytest.mark.parametrize("kind", list(STEPS))
def test_two_ranks_train_what_one_process_trains(kind: str, strategy: str, teacher: str) -> None:
    alone = trained(kind, "single", 20, STEPS[kind], teacher)
    for found in run_distributed(trained, kind, strategy, 10, STEPS[kind], teacher, world_size=2)[:1]:
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    if kind == "prune":
        assert (alone["net.1.weight_mask"] == 0).mean() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    "kind", ["prune", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("distill", "quantize"))]
)
def test_a_run_stopped_between_two_masks_resumes_bitwise(kind: str, teacher: str, tmp_path: Path) -> None:
    data = DataLoader(example("digits").DigitsData().parts[1], batch_size=20, shuffle=True)

    def fit(name: str, stop: int) -> None:
        task, callbacks = task_of(kind, teacher)

        def stop_there(run: Any) -> None:
            if run.progress.steps == stop:
                run.stop("there")

        callbacks.append(LambdaCallback(on_step_end=stop_there))
        trainer = Trainer(max_steps=12, callbacks=callbacks, run_dir=tmp_path / name, **QUIET)
        trainer.fit(task, data, resume="auto")

    fit("whole", -1)
    fit("parts", 5)
    fit("parts", -1)
    whole, parts = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("whole", "parts"))
    assert whole == parts
