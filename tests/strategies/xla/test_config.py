"""XLA's strategies before torch_xla is loaded: precisions, and what they leave idle."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from drivetrain.strategies import STRATEGIES, Hardware
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import XLA

HERE = importlib.util.find_spec("torch_xla") is not None


@pytest.mark.skipif(not HERE, reason="torch_xla is not installed")
def test_gpu_is_left_idle_only_by_somebody_who_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in XLA:
        kind: Any = STRATEGIES[name]
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        assert "Set PJRT_DEVICE=CPU" in kind.available(Hardware(cuda=1)).reason
        assert kind.available(Hardware())
        assert kind.available(Hardware(cuda=1, tpu=1))
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        assert kind.available(Hardware(cuda=1))


def test_xla_precisions_are_supported_or_refused_with_the_reason() -> None:
    for name in XLA:
        kind: Any = STRATEGIES[name]
        supports = lambda each, kind=kind: kind().supports(as_precision(each))  # noqa: E731
        assert supports("32")
        assert supports("bf16-mixed")
        assert "bf16-mixed" in supports("16-true").reason
        reason = "float32 only" if name == "xla_fsdp" else "bf16-true-nearest"
        assert reason in supports("bf16-true").reason
        assert bool(supports("bf16-true-nearest")) is (name != "xla_fsdp")
