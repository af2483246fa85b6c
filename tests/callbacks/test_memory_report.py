"""What memory is used for adds up to what can be computed by hand."""

import logging
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import MemoryConfig, MemoryReport, OptimizerConfig, TaskModule
from drivetrain.engine.memory_profile import MemoryUse

SIZE, BLOCKS = 64, 4
ELEMENTS = 2 * BLOCKS * SIZE * SIZE
COUNTERS = 2 * BLOCKS * 4  # bytes: AdamW counts the steps of each parameter
MANY = 4096
RESULT = 4 * MANY * SIZE  # the bytes of a layer's result for that many samples


def dense() -> nn.Sequential:
    linear = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
    return nn.Sequential(*(part for each in linear for part in (each, nn.Tanh())))


class Words(TaskModule):
    broken = 0  # the step that fails

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.blocks = nn.Sequential(*(dense() for _ in range(BLOCKS)))
        self.register_buffer("kept", torch.zeros(1000))

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self.steps == self.broken:
            raise RuntimeError("broken")
        return self.blocks(batch["x"]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def batches(samples: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"x": torch.randn(samples, SIZE, generator=generator)} for _ in range(4)]


def used(task: TaskModule | None = None, samples: int = 1, **options: Any) -> MemoryUse:
    report = MemoryReport(show=False)
    quiet(**{"max_epochs": 1, **options}, callbacks=[report]).fit(task or Words(), batches(samples))
    assert report.use is not None
    assert report.use.total == report.use.measured
    return report.use


def test_bytes_of_each_element_by_precision() -> None:
    for precision, weight, state, copies in (
        ("32", 4, 8, 0),
        ("bf16-true", 2, 8, 8),  # of the weight and its gradient
        ("bf16-true-master", 2, 12, 4),  # of the gradient; that of the weight is part of the state
    ):
        use = used(precision=precision)
        assert use.parameters == use.gradients == weight * ELEMENTS, precision
        assert use.optimizer == state * ELEMENTS + COUNTERS, precision
        assert use.buffers == 1000 * weight
        assert use.activations < 0.1 * use.parameters
        assert use.other <= 4  # a loss scale
        extra = use.step - copies * ELEMENTS
        assert extra >= 0 if precision == "bf16-true" else extra == 0  # what the rounding makes


def test_activations_count_until_backward_frees_them() -> None:
    plain = used(samples=MANY)
    # The batch and the results of all layers; at the beginning of backward up to 4 more.
    assert 1 + 2 * BLOCKS <= plain.activations / RESULT <= 1 + 2 * BLOCKS + 4.1
    again = used(samples=MANY, memory=MemoryConfig(activation_checkpointing=True)).activations
    # The batch, the results of all blocks, and those of one block's layers.
    assert 1 + BLOCKS + 2 <= again / RESULT <= 1 + BLOCKS + 2 + 4.1
    assert again < plain.activations
    halves = used(samples=MANY, gradient_accumulation_steps=2)
    assert plain.gradients == 0  # at the beginning of backward, when most is in use
    assert halves.gradients == halves.parameters
    assert halves.activations <= plain.activations + 2 * RESULT  # a second batch


def test_shards_count_with_the_rank_that_holds_them() -> None:
    for use in on_two_ranks(lambda: used(strategy="fsdp", devices=2)):
        assert use.parameters == 4 * ELEMENTS / 2
        assert use.optimizer == 2 * use.parameters + COUNTERS
        # One gathered block and the next: FSDP frees the others without an operation.
        assert 0 < use.other <= 2 * 4 * ELEMENTS / BLOCKS + 8


def test_memory_report_comes_once_and_leaves_nothing_also_after_an_error() -> None:
    report, task = MemoryReport(), Words()
    with heard(level=logging.INFO) as texts:
        quiet(max_epochs=2, callbacks=[report]).fit(task, batches())
    assert texts == [str(report.use)]
    assert "memory at the peak" in texts[0]
    task.broken = task.steps + 2
    with pytest.raises(RuntimeError, match="broken"):
        quiet(max_epochs=1, callbacks=[report]).fit(task, batches())
    assert report.use is None
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
