"""What memory is used for adds up to what torch's own profiler sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import (
    Callback,
    CompileConfig,
    ConfigError,
    MemoryConfig,
    MemoryReport,
    OptimizerConfig,
    TaskModule,
)
from drivetrain.gradient_release import GradientRelease
from drivetrain.memory_use import MemoryWatch
from drivetrain.registry import is_installed
from drivetrain.testing.distributed import run_distributed

SIZE, LENGTH, WORDS = 64, 32, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class Words(TaskModule):
    """A small transformer; with `blocks` of linear layers alone, a perceptron."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        layers = [Block() if attention else Dense() for _ in range(4)]
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(SIZE, WORDS)
        self.register_buffer("kept", torch.zeros(1000))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


class Dense(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(SIZE, 4 * SIZE), nn.Tanh(), nn.Linear(4 * SIZE, SIZE))


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"tokens": torch.randint(WORDS, (16, LENGTH), generator=generator)} for _ in range(3)]


class Profiled(Callback):
    """The peak of the second update's allocations, by torch's profiler, beyond what is there before it."""

    def __init__(self) -> None:
        self.updates = self.peak = 0

    def on_step_start(self, run: Any) -> None:
        if self.updates == 1:
            self.profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            self.profile.__enter__()

    def on_step_end(self, run: Any) -> None:
        self.updates += 1
        if self.updates == 2:
            self.profile.__exit__(None, None, None)
            held = 0
            events = [e for e in self.profile.kineto_results.events() if e.name() == "[memory]"]
            for event in sorted(events, key=lambda each: each.start_ns()):
                held += event.nbytes()
                self.peak = max(self.peak, held)


def measured(attention: bool, memory: Any, **options: Any) -> tuple[MemoryReport, Profiled, Words]:
    torch.manual_seed(0)
    task, report, profiled = Words(attention), MemoryReport(show=False), Profiled()
    # In runs of their own: each sees what the other does.
    for callback in (report, profiled):
        quiet(**{"max_epochs": 1, **options}, memory=memory, callbacks=[callback]).fit(task, batches())
    return report, profiled, task


@pytest.mark.parametrize("attention", [False, True], ids=["perceptron", "transformer"])
@pytest.mark.parametrize(
    "memory",
    [None, MemoryConfig(activation_checkpointing=True), MemoryConfig(release_gradients=True)],
    ids=["plain", "again", "released"],
)
def test_the_parts_add_up_to_what_torchs_profiler_measures(attention: bool, memory: Any) -> None:
    report, profiled, task = measured(attention, memory)
    use = report.use
    assert use is not None
    elements = sum(each.numel() for each in task.parameters())
    steps = len(list(task.parameters()))
    assert use.parameters == 4 * elements
    assert use.optimizer == 8 * elements + 4 * steps
    assert use.buffers == 4000
    before = use.parameters + use.optimizer + use.buffers + 8 * 16 * LENGTH
    assert use.total == pytest.approx(before + profiled.peak, rel=0.05)


@pytest.mark.parametrize("attention", [False, True], ids=["perceptron", "transformer"])
@pytest.mark.parametrize(
    ("precision", "weight", "state"),
    [
        ("bf16-mixed", 4, 8),
        ("16-mixed", 4, 8),
        ("bf16-true", 2, 8),
        ("16-true", 2, 8),
        ("bf16-true-master", 2, 12),
        ("64", 8, 16),
    ],
)
def test_so_they_do_in_every_precision(attention: bool, precision: str, weight: int, state: int) -> None:
    report, profiled, task = measured(attention, None, precision=precision)
    use = report.use
    assert use is not None
    elements = sum(each.numel() for each in task.parameters())
    assert use.parameters == weight * elements
    assert use.optimizer == pytest.approx(state * elements, rel=0.01)
    before = use.parameters + use.optimizer + use.buffers + use.other + 8 * 16 * LENGTH
    assert use.total == pytest.approx(before + profiled.peak, rel=0.05)


class Scratch(TaskModule):
    """Its operations take much beside their results: `kind` is "lstm" or "attention"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, 3 * SIZE)
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True) if kind == "lstm" else None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.lstm is not None:
            return self.lstm(x)[0]
        query, key, value = self.mix(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.float().square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.01)


@pytest.mark.parametrize(("kind", "precision"), [("lstm", "32"), ("lstm", "bf16-mixed"), ("attention", "32")])
def test_so_they_do_with_what_operations_take_beside_their_results(kind: str, precision: str) -> None:
    report, profiled = MemoryReport(show=False), Profiled()
    for callback in (report, profiled):
        quiet(max_epochs=1, precision=precision, callbacks=[callback]).fit(Scratch(kind), batches())
    use = report.use
    assert use is not None
    before = use.parameters + use.optimizer + 8 * 16 * LENGTH
    assert use.total == use.measured == pytest.approx(before + profiled.peak, rel=0.01)
    assert use.kernels > 0.02 * use.total
    assert "  kernels " in str(use)


def test_beside_another_profiler_that_is_not_seen_and_both_go_on() -> None:
    report = MemoryReport(show=False)
    with torch.autograd.profiler.profile() as profile:
        quiet(max_epochs=1, callbacks=[report]).fit(Scratch("lstm"), batches())
    assert report.use is not None
    assert report.use.kernels == 0
    assert report.use.activations > 0
    assert [each.count for each in profile.key_averages() if each.key == "aten::lstm"] == [3]


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-true-master"])
def test_float32_copies_of_a_step_are_no_activations(precision: str) -> None:
    class Wide(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(1, 100_000)

        def training_step(self, batch: Any) -> Tensor:
            return self.wide(batch[0][:1, :1]).square().mean()

    report = MemoryReport(show=False)
    quiet(max_steps=2, precision=precision, callbacks=[report]).fit(Wide(), pairs())
    assert report.use is not None
    copies = 4 * 200_000 * (1 if precision == "bf16-true-master" else 2)
    assert report.use.step >= copies
    assert report.use.activations < report.use.step


def test_updates_that_a_loss_scale_skips_do_not_count() -> None:
    class Overflowing(Words):
        steps = 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            loss = super().training_step(batch)
            if self.steps in (1, 3):
                loss.loss.register_hook(lambda grad: grad * math.inf)
            return loss

    report = MemoryReport(show=False)
    quiet(max_epochs=2, precision="16-mixed", callbacks=[report]).fit(Overflowing(False), batches())
    assert report.use is not None
    assert report.use.optimizer > 2 * report.use.parameters


def test_a_fit_of_one_update_tells_of_that(capsys: pytest.CaptureFixture[str]) -> None:
    report = MemoryReport()
    quiet(max_steps=1, callbacks=[report]).fit(Words(False), batches())
    assert report.use is not None
    assert "the only one" in capsys.readouterr().err


def test_less_is_used_where_memory_is_traded() -> None:
    plain, again, released = (
        measured(True, memory)[0].use
        for memory in (
            None,
            MemoryConfig(activation_checkpointing=True),
            MemoryConfig(activation_checkpointing=True, release_gradients=True),
        )
    )
    assert plain is not None
    assert again is not None
    assert released is not None
    assert again.activations < 0.5 * plain.activations
    assert released.gradients < 0.2 * again.gradients
    assert released.total < again.total < plain.total


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


def test_it_prints_once_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report, task = MemoryReport(), Words(False)
    quiet(max_epochs=2, callbacks=[report]).fit(task, batches())
    error = capsys.readouterr().err
    assert error.count("memory at the peak") == 1
    assert str(report.use) in error
    assert not any(each._post_accumulate_grad_hooks for each in task.parameters())
    first = report.use
    quiet(max_epochs=1, callbacks=[report]).fit(task, batches())
    assert report.use is not None
    assert report.use is not first


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
        quiet(max_epochs=1, callbacks=[report]).fit(Broken(False), batches())
    assert report.use is None
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert not torch.autograd._profiler_enabled()


def test_a_compiled_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile=False"):
        quiet(max_epochs=1, compile=CompileConfig(backend="eager"), callbacks=[MemoryReport()]).fit(
            Words(False), batches()
        )


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs DeepSpeed")
def test_deepspeeds_buckets_are_refused_and_not_called_activations() -> None:
    with pytest.raises(RuntimeError, match=r"MemoryReport with strategy 'deepspeed'.*reduce_bucket_size"):
        run_distributed(with_zero, world_size=1)


def with_zero() -> None:
    quiet(max_epochs=1, strategy="zero2", devices=1, callbacks=[MemoryReport()]).fit(Words(False), batches())
