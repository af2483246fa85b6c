"""What a fit on a GPU is told that would make it faster."""

import os

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import nn
from torch.torch_version import TorchVersion

from drivetrain.engine import gpu_advice, memory_advice
from drivetrain.engine.gpu_advice import advice
from drivetrain.integrations.torchao.float8 import Float8
from drivetrain.strategies.precision.registry import as_precision


def test_advice_names_tf32_compilation_and_the_layout_of_convolutions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ampere, volta, single, task = (8, 0), (7, 0), as_precision("32"), Regression()
    images = nn.Sequential(nn.Conv2d(3, 8, 3))
    (line,) = advice(ampere, single, task, False)
    assert "precision='tf32'" in line
    for capability, precision in ((volta, single), (ampere, as_precision("bf16-mixed"))):
        assert advice(capability, precision, task, False) == []
    (line,) = advice(ampere, Float8(), task, False)
    assert "compile=True" in line
    assert advice(ampere, Float8(), task, True) == []
    (line,) = advice(volta, single, images, False)
    assert "channels_last" in line
    assert advice(volta, single, images.to(memory_format=torch.channels_last), False) == []
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ampere)
    monkeypatch.setattr(gpu_advice._LOG, "info", told.append)
    for _ in range(2):
        gpu_advice.advise(torch.device("cuda", 0), single, task, False)
    gpu_advice.advise(torch.device("cpu"), single, task, False)
    assert len(told) == 1
    gpu_advice._told.clear()


def test_out_of_memory_advice_names_expandable_segments_once_cuda_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "expandable" not in memory_advice.memory_advice(None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in memory_advice.memory_advice(None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable" not in memory_advice.memory_advice(None)


def test_deterministic_sets_the_workspace_that_older_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for version, expected in (("2.9.1", ":4096:8"), ("2.13.0", None)):
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        quiet(max_steps=1, deterministic=True).fit(Regression(), pairs(2))
        assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None) == expected
