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


@pytest.mark.parametrize("name", list(XLA))
def test_xla_precisions_are_supported_or_refused_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = STRATEGIES[name]
    found = {
        each: kind().supports(as_precision(each))
        for each in (
            *("32", "bf16-mixed", "16-mixed", "16-true", "bf16-true", "bf16-true-master"),
            *("bf16-true-nearest", "64"),
        )
    }
    assert found["32"]
    assert found["bf16-mixed"]
    for each in ("16-mixed", "16-true"):
        assert "bf16-mixed" in found[each].reason
    for each in ("bf16-true", "bf16-true-master"):
        assert ("float32 only" if name == "xla_fsdp" else "bf16-true-nearest") in found[each].reason
    for each in ("bf16-true-nearest", "64"):
        assert "float32 only" in found[each].reason if name == "xla_fsdp" else found[each]
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert "float" in kind().supports(as_precision("64")).reason
