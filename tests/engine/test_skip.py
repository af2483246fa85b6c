"""Updates that are left out: nothing of them stays behind, and the run goes on as if they never were."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.fragile import GOOD, GRADIENT, INFINITE, INPUT, NAN, ONLY_LOSS, Fragile, LeftBehind, marked
from tests.support.outcome import outcome, weights
from tests.support.tasks import Duel, duels, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    MemoryConfig,
    NonFiniteError,
    OptimizerConfig,
    Run,
    StrategyError,
    TaskModule,
    Trainer,
)
from drivetrain.engine.skip import all_finite
from drivetrain.run.nonfinite import IN_A_ROW, check_on_nonfinite
from drivetrain.strategies import STRATEGIES, Strategy
from drivetrain.strategies.base import Support
from drivetrain.task.optim.config import OPTIMIZERS
from drivetrain.testing.distributed import run_distributed

BAD = (NAN, INFINITE, GRADIENT, ONLY_LOSS, INPUT)
MARKS = [mark for bad in BAD for mark in (GOOD, GOOD, bad)] + [GOOD, GOOD]
"""Two windows of one batch each, then a bad one, and so on."""


def in_batches(marks: list[int], size: int = 4) -> list[int]:
    """As many samples of each mark as a batch has; of a bad batch the first is bad."""
    return [mark if not index else GOOD for mark in marks for index in range(size)]


def skipping(**options: Any) -> Trainer:
    return quiet(**{"max_epochs": 1, "on_nonfinite": "skip", "log_every": "2 steps", **options})


def left_behind(task: TaskModule, **options: Any) -> LeftBehind:
    watch = LeftBehind()
    options.setdefault("max_grad_norm", 1.0)
    skipping(callbacks=[watch], **options).fit(task, marked(in_batches(MARKS), 4))
    return watch


TORCHAO = ("adam8bit", "adam4bit", "adamfp8", "adamw8bit", "adamw4bit", "adamwfp8")


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {*TORCHAO, "sparseadam"}))
def test_of_a_skipped_update_nothing_stays_behind_in_any_optimizer(name: str) -> None:
    options = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    watch = left_behind(Fragile(OptimizerConfig(name, lr=0.01, **options)))
    assert watch.applied == [mark == GOOD for mark in MARKS]
    assert watch.changed == {index: [] for index, mark in enumerate(MARKS) if mark != GOOD}


@pytest.mark.parametrize("name", ["adamw8bit", "adamwfp8"])
def test_nor_of_one_that_keeps_its_state_in_fewer_bits(name: str) -> None:
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        watch = left_behind(Fragile(OptimizerConfig(name, lr=0.01)))
    assert set(map(tuple, watch.changed.values())) == {()}
    assert len(watch.changed) == len(BAD)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64"])
def test_nor_in_any_precision(precision: str) -> None:
    watch = left_behind(Fragile(), precision=precision)
    assert watch.applied == [mark == GOOD for mark in MARKS]
    assert watch.changed == {index: [] for index, mark in enumerate(MARKS) if mark != GOOD}


def test_a_bad_loss_does_not_lower_the_loss_scale() -> None:
    watch = left_behind(Fragile(), precision="16-mixed")
    by_loss = {index: [] for index, mark in enumerate(MARKS) if mark not in (GOOD, GRADIENT)}
    assert by_loss.items() <= watch.changed.items()
    # That the gradient of a finite loss is not finite is what the scale is there for.
    assert ".strategy.scaler.scale" in watch.changed[MARKS.index(GRADIENT)]


def test_one_bad_micro_batch_of_a_window_is_enough() -> None:
    watch = LeftBehind()
    marks = [GOOD, GOOD, GOOD, NAN, GOOD, GRADIENT, GOOD, GOOD]
    trainer = skipping(callbacks=[watch], gradient_accumulation_steps=2, micro_batch=2)
    trainer.fit(Fragile(), marked(in_batches(marks), 4))
    assert watch.applied == [True, False, False, True]
    assert watch.changed == {1: [], 2: []}


def test_a_run_goes_on_as_if_the_bad_batches_had_never_been_there(tmp_path: Path) -> None:
    data = marked(in_batches(MARKS), 4)
    good = [4 * index + each for index, mark in enumerate(MARKS) if mark == GOOD for each in range(4)]
    found = []
    for directory, samples in (("all", range(4 * len(MARKS))), ("good", good)):
        task = Fragile()
        trainer = skipping(loggers=("jsonl",), run_dir=tmp_path / directory)
        result = trainer.fit(task, DataLoader(Subset(data.dataset, samples), batch_size=4))
        lines = (tmp_path / directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(each) for each in lines]
        skipped = [row.pop("train/skipped_updates") for row in rows][-1]
        assert all(math.isfinite(value) for row in rows for value in row.values())
        found.append((skipped, weights(task), result.progress.updates, rows))
    assert found[0][1:] == found[1][1:]
    assert [each[0] for each in found] == [len(BAD), 0]


def test_the_log_names_what_was_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        left_behind(Fragile())
    first, gradient = caplog.messages[0], caplog.messages[2]
    assert first == "update 2 was not made: NaN or infinite on rank 0: 'loss'"
    assert gradient.startswith("update 6 was not made: NaN or infinite: the gradient of 'net.0.weight'")


def test_too_many_in_a_row_end_the_run_with_an_error() -> None:
    with pytest.raises(NonFiniteError, match=f"{IN_A_ROW} updates in a row .* rank 0: 'loss'"):
        skipping().fit(Fragile(), marked(in_batches([GOOD, *[NAN] * IN_A_ROW], 2), 2))
    skipping().fit(Fragile(), marked(in_batches([GOOD, *[NAN] * (IN_A_ROW - 1), GOOD, NAN], 2), 2))


def test_a_run_of_which_every_update_was_skipped_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match=r"all 3 updates were skipped.*nothing was trained"):
        skipping().fit(Fragile(), marked(in_batches([NAN] * 3, 2), 2))


def test_a_resumed_run_skips_alike(tmp_path: Path) -> None:
    data = marked(in_batches(MARKS), 4, shuffle=True)
    policy = CheckpointConfig(every="2 steps", best=0, by=None)
    for directory, stops in (("whole", (14,)), ("parts", (5, 14))):
        for steps in stops:
            trainer = skipping(
                max_epochs=None,
                max_steps=steps,
                checkpoint=policy,
                loggers=("csv", "jsonl"),
                run_dir=tmp_path / directory,
            )
            trainer.fit(Fragile(OptimizerConfig("adamw", lr=0.01)), data, resume="auto")
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def test_of_several_optimizers_each_is_skipped_for_itself() -> None:
    class Broken(Duel):
        def training_step(self, batch: Any) -> Any:
            for number, (name, loss) in enumerate(super().training_step(batch)):
                yield name, loss * torch.nan if number == 0 and self.breaks else loss

    class Break(Callback):
        def on_step_start(self, run: Run) -> None:
            run.task.breaks = run.progress.epoch_batches == 1

    watch = LeftBehind()
    task = Broken()
    result = skipping(callbacks=[Break(), watch], log_every="1 step").fit(task, duels())
    assert result.progress.skipped == 0, "an update of which one optimizer stepped is made"
    assert all(map(math.isfinite, result.metrics.values()))


class Rivals(TaskModule):
    """Two networks with a batch norm each, of which the second is lost in the batches that say so.

    Args:
        first: Whether it is the first that is lost.
    """

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.two = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.first = first

    def training_step(self, batch: Any) -> Any:
        middle = self.one(batch["x"])
        one = (middle - 1).square().mean()
        yield "one", one * batch["factor"] if self.first else one
        two = (self.two(middle if self.first else batch["x"]) - 1).square().mean()
        yield "two", two if self.first else two * batch["factor"]
        return {"total_loss": one.detach() + (two * batch["factor"]).detach()}

    def configure_optimizers(self) -> Any:
        return {"one": OptimizerConfig("sgd", lr=0.1), "two": OptimizerConfig("sgd", lr=0.1)}


def rivalry(count: int = 6, bad: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    factors = [torch.tensor(torch.nan if index == bad else 1.0) for index in range(count)]
    return [{"x": torch.randn(4, 3, generator=generator), "factor": each} for each in factors]


@pytest.mark.parametrize("first", [False, True])
def test_the_buffers_of_an_optimizer_that_has_stepped_stay(first: bool) -> None:
    moved = Rivals(first)
    result = skipping(log_every="1 step").fit(moved, rivalry())
    assert result.progress.updates == 6
    counts = moved.one[0].num_batches_tracked, moved.two[0].num_batches_tracked
    assert counts == ((5, 6) if first else (6, 5))


def test_a_loss_may_be_led_back_through_what_was_put_back() -> None:
    class Shared(Rivals):
        def training_step(self, batch: Any) -> Any:
            fake = self.one(batch["x"])
            yield "two", self.two(fake.detach()).square().mean() * batch["factor"]
            yield "one", self.two(fake).square().mean()

    watch, task = LeftBehind(), Shared()
    skipping(callbacks=[watch]).fit(task, rivalry())
    assert watch.applied == [True] * 6
    assert all(bool(each.isfinite().all()) for each in task.state_dict().values())


def test_what_a_step_returns_after_a_refusal_is_in_no_average() -> None:
    class Totals(Callback):
        def on_fit_start(self, run: Run) -> None:
            self.seen: list[bool] = []

        def on_log(self, run: Run) -> None:
            self.seen.append("train/total_loss" in run.logged)

    seen = Totals()
    result = skipping(log_every="1 step", callbacks=[seen]).fit(Rivals(), rivalry())
    assert seen.seen[:6] == [True, True, False, True, True, True]
    assert math.isfinite(result.metrics["train/total_loss"])


class Turned(TaskModule):
    """Has complex weights, and may have a loss that is finite and a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - 1).square().mean() + (outputs * batch["zero"]).square().sum().sqrt() * batch["on"]

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sgd", lr=0.1)


def turned(bad: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "x": torch.rand(4, 3, generator=generator),
            "zero": torch.tensor(float(index != bad)),
            "on": torch.tensor(float(index == bad)),
        }
        for index in range(6)
    ]


def test_complex_numbers_are_looked_at(tmp_path: Path) -> None:
    watch, task = LeftBehind(), Turned()
    skipping(callbacks=[watch], max_grad_norm=1.0).fit(task, turned())
    assert watch.applied == [True, True, True, False, True, True]
    assert watch.changed == {3: []}
    assert bool(task.weight.isfinite().all())
    policy = CheckpointConfig(every="1 step", keep_last=9, best=0, by=None)
    with pytest.raises(NonFiniteError, match="after update 3 on rank 0: the weights 'weight'"):
        quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path).fit(Turned(), turned())
    assert max(each.name for each in (tmp_path / "checkpoints").iterdir()) == "update-00000003"


class Sparse(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 1, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.table(index)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        worst = int(batch[1].max())
        return outputs.square().mean() + ((outputs * 0).square().sum().sqrt() if worst else 0)

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sparseadam", lr=0.1)


def test_sparse_gradients_are_looked_at() -> None:
    watch = LeftBehind()
    data = [(torch.tensor([0, 1]), torch.tensor([mark])) for mark in (0, 0, 1, 0)]
    skipping(callbacks=[watch]).fit(Sparse(), data)
    assert watch.applied == [True, True, False, True]
    assert watch.changed == {2: []}


def test_a_large_gradient_is_finite() -> None:
    large = torch.full((4,), 3e38)
    assert all(bool(each.all()) for each in all_finite([large, torch.zeros(2, dtype=torch.float64)]))
    (found,) = all_finite([large, torch.tensor([1.0, -torch.inf]), torch.tensor([torch.nan])])
    assert found.tolist() == [True, False, False]
    many = torch.full((2,), complex(3e38, 3e38)), torch.tensor([complex(1, torch.nan)]).conj()
    (found,) = all_finite(many)
    assert found.tolist() == [True, False]


# Every window has a batch of each rank; the bad one is once that of the first, and then of the second.
SHARED = [GOOD, GOOD, GOOD, NAN, GRADIENT, GOOD, GOOD, ONLY_LOSS, GOOD, GOOD]


def _on_ranks(strategy: str, precision: str) -> Any:
    watch, task = LeftBehind(), Fragile()
    trainer = skipping(
        strategy=strategy, devices=2, precision=precision, callbacks=[watch], max_grad_norm=0.5
    )
    result = trainer.fit(task, marked(in_batches(SHARED), 4))
    return watch.applied, watch.changed, result.progress.skipped, weights(task)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "32"), ("fsdp", "32"), ("fsdp", "bf16-mixed")])
def test_all_ranks_skip_what_one_of_them_has(strategy: str, precision: str) -> None:
    first, second = run_distributed(_on_ranks, strategy, precision)
    assert first[:3] == second[:3] == ([True, False, False, False, True], {1: [], 2: [], 3: []}, 3)
    assert first[3] == second[3]


# What is refused.


def test_a_choice_that_there_is_none_of_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"on_nonfinite='skp'\. Did you mean 'skip'"):
        quiet(on_nonfinite="skp")


@pytest.mark.parametrize("name", ["zero2", "xla", "xla_fsdp", "xla_fsdp_v2"])
def test_strategies_that_cannot_leave_an_update_out_say_so(name: str) -> None:
    kind: Any = STRATEGIES["deepspeed" if name == "zero2" else name]
    with pytest.raises(StrategyError, match=r"on_nonfinite='skip' with strategy '\w+': .*'stop'"):
        check_on_nonfinite("skip", kind)
    check_on_nonfinite("stop", kind)


class Elsewhere(Strategy):
    """A strategy of another package, which does not say that it can leave an update out."""

    name = "elsewhere"
    device = torch.device("cpu")

    def supports(self, precision: Any) -> Support:
        return Support(True)

    def prepare(self, module: Any, make_optimizers: Any, precision: Any) -> Any:
        raise NotImplementedError

    def backward(self, loss: Tensor, share: Any = None, inputs: Any = None) -> None:
        raise NotImplementedError

    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Tensor:
        raise NotImplementedError


def test_the_trainer_refuses_them_when_it_is_made() -> None:
    quiet(strategy=Elsewhere())
    with pytest.raises(StrategyError, match="on_nonfinite='skip' with strategy 'elsewhere'"):
        quiet(on_nonfinite="skip", strategy=Elsewhere())


def test_updates_within_backward_cannot_be_skipped() -> None:
    with pytest.raises(ConfigError, match="release_gradients with on_nonfinite='skip'"):
        quiet(on_nonfinite="skip", memory=MemoryConfig(release_gradients=True))
