"""Weights for a module on the meta device: compared at once by the headers, read when it has memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.weights.models import Tied
from torch import nn

from drivetrain import StrategyError, TaskModule
from drivetrain.checkpoint import export_weights
from drivetrain.checkpoint.weights.stored_rows import stored_weights
from drivetrain.checkpoint.weights.warm_start import load_weights_into
from drivetrain.core.errors import CheckpointError
from drivetrain.strategies.checks import check_values


def meta(kind: Any, *arguments: Any) -> Any:
    with torch.device("meta"):
        return kind(*arguments)


def fill(module: nn.Module) -> None:
    stored = stored_weights(module)
    assert stored is not None
    module.to_empty(device="cpu")
    stored.fill(module.named_parameters(remove_duplicate=False))


def test_names_shapes_and_dtypes_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export_weights({"weight": torch.ones(2, 3).double(), "bias": torch.ones(2)}, path)
    module = meta(nn.Linear, 3, 2)
    report = load_weights_into(module, tmp_path)
    assert module.weight.is_meta
    assert report.loaded == ("weight", "bias")
    assert "each process reads its rows" in str(report)
    assert "converted   weight  float64 [2, 3] there, float32 [2, 3] here" in str(report)
    fill(module)
    assert torch.equal(module.weight, torch.ones(2, 3))
    for other, words in (
        (meta(nn.Linear, 3, 4), r"'weight': float64 \[2, 3\] there, float32 \[4, 3\] here"),
        (meta(nn.Bilinear, 3, 3, 2), "of another shape"),
        (meta(nn.Sequential, module, meta(nn.Linear, 1, 1)), "missing: '0.weight'"),
        (meta(nn.Linear, 3, 2).to(torch.float8_e5m2), "float64 .* there, float8_e5m2"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_weights_into(other, tmp_path)
    with pytest.raises(CheckpointError, match="Near it are"):
        load_weights_into(module, tmp_path / "modle.safetensors")


def test_a_file_that_has_changed_since_and_a_number_too_large_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    bias = {"bias": torch.ones(2)}
    first = {"weight": torch.ones(2, 3).double(), **bias}
    large = {"weight": torch.full((2, 3), 1e300, dtype=torch.double), **bias}
    for before, after, words in (
        (first, {"weight": torch.zeros(2, 3).double(), **bias}, "changed.*it was written again"),
        (large, large, r"'weight' of .*has the number 1e\+300"),
        (first, None, "cannot read .*model.safetensors"),
    ):
        export_weights(before, path)
        module = meta(nn.Linear, 3, 2)
        load_weights_into(module, path)
        if after is None:
            path.unlink()
        elif after is not before:
            export_weights(after, path)
        with pytest.raises(CheckpointError, match=words):
            fill(module)


def test_tied_names_with_different_values_are_refused_when_they_are_read() -> None:
    state = Tied().state_dict()
    changed = {**state, "head.weight": state["head.weight"] + 1}
    load_weights_into(module := meta(Tied), changed)
    with pytest.raises(CheckpointError, match="one tensor in the module, and differ"):
        stored_weights(module).fill(Tied().named_parameters(remove_duplicate=False))  # type: ignore[union-attr]


def test_a_strategy_that_reads_no_files_refuses_a_task_that_waits_for_them() -> None:
    class Task(TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(1, 1)

    task = meta(Task)
    task.load_weights({"line.weight": torch.ones(1, 1), "line.bias": torch.ones(1)})
    task.to_empty(device="cpu")
    with pytest.raises(StrategyError, match="call load_weights again"):
        check_values(task, "single")
    task.load_weights({"line.weight": torch.ones(1, 1), "line.bias": torch.ones(1)})
    check_values(task, "single")
