"""What a fit says that has no memory left, and what it sets for deterministic kernels."""

import os

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch.torch_version import TorchVersion

from drivetrain.engine import memory_advice


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
