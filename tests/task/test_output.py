"""What a step returned, for wrappers that hook every tensor with a graph."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain import StepOutput
from drivetrain.task.output import without_other_graphs


def step(batch: torch.Tensor) -> Any:
    outputs = {"scores": batch * 2, "names": ["a"]}
    return StepOutput(outputs["scores"].sum(), outputs, {"size": 3.0} if batch.numel() > 1 else None)


def test_outputs_that_are_looked_at_have_no_graph() -> None:
    batch = torch.ones(2, requires_grad=True)
    found = without_other_graphs(step, keep_outputs=True)(batch)
    assert found.loss.requires_grad
    assert not found.outputs["scores"].requires_grad
    assert torch.equal(found.outputs["scores"], batch.detach() * 2)
    assert found.outputs["names"] == ["a"]
    assert found.metrics == {"size": 3.0}


def test_outputs_that_nobody_looks_at_are_dropped() -> None:
    drop = without_other_graphs(step, keep_outputs=False)
    found = drop(torch.ones(2, requires_grad=True))
    assert (found.outputs, found.metrics) == (None, {"size": 3.0})
    alone = drop(torch.ones(1, requires_grad=True))
    assert isinstance(alone, torch.Tensor)
    assert alone.requires_grad


def test_what_is_no_step_output_stays_as_it_is() -> None:
    named = {"loss": torch.ones(())}
    assert without_other_graphs(lambda batch: named, keep_outputs=False)(torch.ones(1)) is named
