"""What memory is used for adds up to what can be computed by hand."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import (
    CompileConfig,
    ConfigError,
    MemoryConfig,
    MemoryReport,
    MemoryUse,
    OptimizerConfig,
    StrategyError,
    TaskModule,
)
from drivetrain.core.registry import is_installed
from drivetrain.engine.gradient_release import GradientRelease
from drivetrain.engine.memory_profile import MemoryWatch
from drivetrain.strategies import STRATEGIES
from drivetrain.testing.distributed import run_distributed

SIZE, BLOCKS = 64, 4
ELEMENTS = 2 * BLOCKS * SIZE * SIZE
COUNTERS = 2 * BLOCKS * 4  # bytes: AdamW counts the updates of each parameter
MANY = 4096
RESULT = 4 * MANY * SIZE  # the bytes of a layer's result for that many samples


class Dense(nn.Sequential):
    def __init__(self) -> None:
        layers = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        super().__init__(*(part for layer in layers for part in (layer, nn.Tanh())))


class Words(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Dense() for _ in range(BLOCKS)))
        self.register_buffer("kept", torch.zeros(1000))

    def training_step(self, batch: Any) -> Any:
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


@pytest.mark.parametrize(
    ("precision", "weight", "state", "copies"),
    [
        ("32", 4, 8, 0),
        ("bf16-mixed", 4, 8, 0),
        ("16-mixed", 4, 8, 0),
        ("bf16-true", 2, 8, 8),  # of the weight and its gradient
        ("16-true", 2, 8, 8),
        ("bf16-true-master", 2, 12, 4),  # of the gradient; that of the weight is part of the state
        ("64", 8, 16, 0),
    ],
)
def test_the_bytes_of_each_element(precision: str, weight: int, state: int, copies: int) -> None:
    use = used(precision=precision)
    assert use.parameters == use.gradients == weight * ELEMENTS
    assert use.optimizer == state * ELEMENTS + COUNTERS
    assert use.buffers == 1000 * weight
    assert use.activations < 0.1 * use.parameters
    assert use.other <= 4  # a loss scale
    if precision in ("bf16-true", "16-true"):
        assert use.step >= copies * ELEMENTS  # and what the rounding makes
    else:
        assert use.step == copies * ELEMENTS


def test_what_backward_needs_counts_until_it_is_freed() -> None:
    plain = used(samples=MANY).activations
    # The batch and the results of all layers; at the beginning of backward up to 4 more.
    assert 1 + 2 * BLOCKS <= plain / RESULT <= 1 + 2 * BLOCKS + 4.1
    again = used(samples=MANY, memory=MemoryConfig(activation_checkpointing=True)).activations
    # The batch, the results of all blocks, and those of one block's layers.
    assert 1 + BLOCKS + 2 <= again / RESULT <= 1 + BLOCKS + 2 + 4.1
    assert again < plain


def test_a_model_that_runs_twice_in_a_step_keeps_both_results() -> None:
    class Twice(Words):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch) + super().training_step(batch)

    once = used(samples=MANY).activations
    assert used(Twice(), MANY).activations >= once + 2 * BLOCKS * RESULT


def test_micro_batches_share_the_memory_of_their_activations() -> None:
    once = used(samples=MANY)
    use = used(samples=MANY, gradient_accumulation_steps=2)
    assert once.gradients == 0  # at the beginning of backward, when most is in use
    assert use.gradients == use.parameters
    assert use.activations <= once.activations + 2 * RESULT  # a second batch


def test_gradients_that_are_released() -> None:
    use = used(memory=MemoryConfig(release_gradients=True))
    assert use.gradients == 4 * SIZE * SIZE
    assert use.total < 3.5 * use.parameters


def test_a_gradient_counts_as_one_where_it_is_freed_at_once() -> None:
    line = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.1)
    release = GradientRelease(optimizer, lambda: None, {})
    with MemoryWatch(line, [optimizer], torch.device("cpu")) as watch:
        line(torch.ones(1, 256)).sum().backward()
    release.remove()
    use = watch.use()
    assert use.parameters == use.gradients == 4 * 256 * 256
    assert use.activations < use.gradients / 10


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_shards_count_with_the_process_that_holds_them() -> None:
    for use in run_distributed(sharded, world_size=2):
        assert use.parameters == 4 * ELEMENTS / 2
        assert use.optimizer == 2 * use.parameters + COUNTERS
        # One gathered block and the next: FSDP frees the others without an operation.
        assert 0 < use.other <= 2 * 4 * ELEMENTS / BLOCKS + 8


def sharded() -> MemoryUse:
    return used(strategy="fsdp", devices=2)


def test_updates_that_a_loss_scale_skips_do_not_count() -> None:
    class Overflowing(Words):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            loss = super().training_step(batch)
            if self.steps in (1, 3):
                loss.register_hook(lambda grad: grad * math.inf)
            return loss

    use = used(Overflowing(), max_epochs=2, precision="16-mixed")
    assert use.optimizer > 2 * use.parameters
    assert use.gradients == use.parameters


def test_it_reports_once_and_leaves_nothing() -> None:
    report, task = MemoryReport(), Words()
    with heard(level=logging.INFO) as texts:
        quiet(max_epochs=2, callbacks=[report]).fit(task, batches())
    assert texts == [str(report.use)]
    assert "memory at the peak" in texts[0]
    assert report.use is not None
    with heard("no second update", logging.INFO) as texts:
        quiet(max_steps=1, callbacks=[report]).fit(task, batches())
    assert report.use is None
    assert len(texts) == 1


def test_it_watches_no_more_after_an_error() -> None:
    class Broken(Words):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("broken")
            return super().training_step(batch)

    report = MemoryReport(show=False)
    with pytest.raises(RuntimeError, match="broken"):
        quiet(max_epochs=1, callbacks=[report]).fit(Broken(), batches())
    assert report.use is None
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


def test_a_compiled_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile=False"):
        used(compile=CompileConfig(backend="eager"))


@pytest.mark.parametrize("name", ["deepspeed", "xla", "xla_fsdp", "xla_fsdp_v2"])
def test_what_it_cannot_observe_is_refused_when_the_trainer_is_made(name: str) -> None:
    kind: Any = STRATEGIES[name]
    device = torch.device("cpu" if name == "deepspeed" else "xla")
    strategy: Any = SimpleNamespace(name=kind.name, device=device)
    with pytest.raises(StrategyError, match=f"MemoryReport with strategy '{name}'"):
        MemoryReport().check_trainer(quiet(), strategy)


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs DeepSpeed")
def test_deepspeeds_buckets_are_refused_and_not_called_activations() -> None:
    with pytest.raises(StrategyError, match=r"MemoryReport with strategy 'deepspeed'.*reduce_bucket_size"):
        quiet(max_epochs=1, strategy="zero2", devices=1, callbacks=[MemoryReport()])
