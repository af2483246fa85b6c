"""The promises of exactness within one process: accumulation, rates, clipping, means."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import PADDING, Duel, NextToken, Regression, duels, pairs, quiet, ragged, variant
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.core.errors import ConfigError, DataError, NonFiniteError, StrategyError
from drivetrain.strategies.deepspeed.strategy import DeepSpeed
from drivetrain.strategies.single import SingleDevice
from drivetrain.task.optim.build import build_optimizer, build_schedule

SPLITS = [(4, 2), (2, 4), (1, 8)]  # batch size and micro-batches per window: of 8 samples each
UPDATERS = {
    "sgd": (OptimizerConfig("sgd", lr=0.5, momentum=0.9), None),
    "adamw": (OptimizerConfig("adamw", lr=0.05, schedule="cosine", warmup_steps=1), None),
    "clipped": (OptimizerConfig("sgd", lr=0.5), 0.05),
}


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def gradient_recorder(task: TaskModule, seen: list[dict[str, Tensor]]) -> LambdaCallback:
    def record(run: Any) -> None:
        seen.append({n: p.grad.clone() for n, p in task.named_parameters() if p.grad is not None})

    return LambdaCallback(on_before_optimizer_step=record)


def train_tokens(
    batch_size: int, accumulation: int, how: str, precision: str = "32"
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[float]]:
    """The weights after an epoch of 22 sequences, windows of 8, 8 and 6; each step's gradient and loss."""
    optimizer, max_grad_norm = UPDATERS[how]
    task, gradients = NextToken(optimizer), []
    options: Any = {"max_grad_norm": max_grad_norm, "callbacks": [gradient_recorder(task, gradients)]}
    trainer = quiet(max_epochs=1, precision=precision, gradient_accumulation_steps=accumulation, **options)
    steps = trainer.steps(task, DataLoader(ragged(), batch_size=batch_size, shuffle=True))
    losses = [step.loss for step in steps]
    return dict(task.state_dict()), gradients, losses


@pytest.mark.parametrize("how", UPDATERS)
def test_accumulation_equals_the_big_batch_on_a_ragged_token_loss(how: str) -> None:
    whole, gradients, losses = train_tokens(8, 1, how)
    exact, exact_gradients, _ = train_tokens(8, 1, how, "64")
    for split in SPLITS:
        parts, split_gradients, split_losses = train_tokens(*split, how)
        assert len(gradients) == len(split_gradients) == 3
        # Before the first step the weights are the same, so that only the summing differs.
        assert largest_difference(split_gradients[0], gradients[0]) < 1e-6
        assert split_losses == pytest.approx(losses, rel=1e-6)
        if how != "adamw":  # which divides by the gradient's size
            assert largest_difference(parts, whole) < 1e-6
        # In double precision no rounding can hide or excuse a wrong weight, also in the last window.
        parts, split_gradients, _ = train_tokens(*split, how, "64")
        assert largest_difference(parts, exact) < 1e-12
        for mine, right in zip(split_gradients, exact_gradients, strict=True):
            assert largest_difference(mine, right) < 1e-12


def test_a_micro_batch_without_a_token_contributes_nothing() -> None:
    """Its own loss is a mean over nothing, 0 / 0."""
    samples = ragged(8)
    assert bool((samples[3]["tokens"] == PADDING).all())
    results = []
    for data in (samples, [each for number, each in enumerate(samples) if number != 3]):
        task = NextToken(OptimizerConfig("sgd", lr=0.5))
        trainer = quiet(max_epochs=1, gradient_accumulation_steps=8)
        (step,) = trainer.steps(task, DataLoader(data, batch_size=1))
        results.append((weights(task), step.loss))
    assert results[0] == results[1]


def test_a_window_without_a_token_is_skipped() -> None:
    task = NextToken(OptimizerConfig("adamw", lr=0.5, schedule="linear"))
    nothing = {"tokens": torch.full((2, 5), PADDING)}
    something = {"tokens": torch.arange(10).reshape(2, 5) % 3 + 1}
    other = NextToken(OptimizerConfig("adamw", lr=0.5, schedule="linear", total_steps=4))
    other.load_state_dict(task.state_dict())
    result = quiet(max_epochs=2, log_every=1).fit(task, [nothing, something])
    assert (result.progress.steps, result.progress.skipped) == (2, 2)
    without = quiet(max_epochs=2, log_every=1).fit(other, [something])
    assert weights(task) == weights(other)
    assert result.metrics["train/loss"] == without.metrics["train/loss"]
    with pytest.raises(DataError, match=r"epoch 0 made no step.*NextToken\.loss_weight gave 0"):
        quiet(max_steps=2).fit(NextToken(OptimizerConfig("sgd")), [nothing])


def test_accumulation_equals_the_big_batch_with_two_optimizers() -> None:
    found = []
    for batch_size, accumulation in ((8, 1), (4, 2), (1, 8)):
        task, options = Duel(), {"max_epochs": 3, "precision": "64", "max_grad_norm": 0.1}
        trainer = quiet(gradient_accumulation_steps=accumulation, **options)
        metrics = trainer.fit(task, DataLoader(duels(), batch_size=batch_size)).metrics
        found.append((task.state_dict(), metrics))
    for parts, values in found[1:]:
        assert largest_difference(parts, found[0][0]) < 1e-12
        # The spread is a statistic of each batch and not a mean over samples.
        for name in ("train/discriminator_loss", "train/generator_loss"):
            assert values[name] == pytest.approx(found[0][1][name], rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt", "warmup_stable_decay"])
def test_the_rate_at_a_step_does_not_depend_on_accumulation(schedule: str) -> None:
    optimizer = OptimizerConfig("sgd", lr=0.1, schedule=schedule, warmup_steps=2)

    def rates(batch_size: int, accumulation: int) -> list[float]:
        seen: list[float] = []
        note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
        trainer = quiet(max_epochs=2, gradient_accumulation_steps=accumulation, callbacks=[note])
        trainer.fit(Regression(optimizer), pairs(22, batch_size))
        return seen

    right, factor = rates(8, 1), build_schedule(optimizer, 6)
    assert factor is not None
    assert right == pytest.approx([0.1 * factor(step) for step in range(6)])
    assert rates(4, 2) == rates(1, 8) == right


def test_clipping_uses_the_norm_over_all_parameters_and_reports_it() -> None:
    task, gradients = NextToken(OptimizerConfig("sgd", lr=1.0)), []
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer = quiet(max_steps=1, max_grad_norm=0.01, callbacks=[gradient_recorder(task, gradients)])
    (step,) = trainer.steps(task, DataLoader(ragged(8), batch_size=8))

    def norm_of(tensors: Any) -> float:
        return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))

    norm = norm_of(gradients[0].values())
    assert norm > 0.01
    assert step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-6)
    moved = norm_of(before[name] - value for name, value in task.state_dict().items())
    assert moved == pytest.approx(0.01, rel=1e-3)  # a learning rate of 1 moves by the clipped gradient


def change_of_weights(optimizer: OptimizerConfig, **options: Any) -> Tensor:
    task = Regression(optimizer)
    before = task.line.weight.detach().clone()
    quiet(max_steps=1, **options).fit(task, pairs(8, 8 // options.get("devices", 1)))
    return task.line.weight.detach() - before


def by_value(**options: Any) -> tuple[Tensor, Tensor]:
    sgd = OptimizerConfig("sgd", lr=1.0)
    return change_of_weights(sgd, **options), change_of_weights(sgd, max_grad_value=0.5, **options)


def test_max_grad_value_clips_each_element_of_a_step() -> None:
    whole, clipped = by_value()
    assert whole.abs().max() > 0.5 > whole.abs().min()
    torch.testing.assert_close(clipped, whole.clamp(-0.5, 0.5))
    torch.testing.assert_close(by_value(gradient_accumulation_steps=2)[1], clipped)
    torch.testing.assert_close(by_value(precision="16-mixed")[1], clipped, atol=1e-3, rtol=1e-3)  # unscaled
    own = OptimizerConfig("sgd", lr=1.0, max_grad_norm=100.0)  # an optimizer's own limit replaces it
    torch.testing.assert_close(change_of_weights(own, max_grad_value=0.5), whole)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_max_grad_value_clips_the_gradient_of_all_ranks(strategy: str) -> None:
    for clipped in on_two_ranks(lambda: by_value(strategy=strategy, devices=2)[1]):
        torch.testing.assert_close(clipped, by_value()[1])


def test_max_grad_value_sums_the_entries_of_a_sparse_gradient_first() -> None:
    looked = variant(training_step=lambda self, batch: F.mse_loss(self.rows(batch), torch.full((2, 2), 9.0)))
    task = looked(OptimizerConfig("sgd", lr=1.0))
    task.line, task.rows = nn.Identity(), nn.Embedding.from_pretrained(torch.zeros(3, 2), False, sparse=True)
    quiet(max_steps=1, max_grad_value=8.0).fit(task, [torch.tensor([1, 1])])
    assert task.rows.weight.tolist() == [[0, 0], [8, 8], [0, 0]]  # not 4.5 + 4.5


def test_max_grad_value_is_refused_by_a_strategy_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleDevice, "refusals", DeepSpeed.refusals)
    with pytest.raises(StrategyError, match="max_grad_value with strategy 'single': DeepSpeed's optim"):
        quiet(max_grad_value=1.0)


PARTS: dict[str, Callable[[], Tensor]] = {
    "columns": lambda: torch.randn(6, 8)[:, :4],
    "steps": lambda: torch.randn(12)[::2],
    "transposed with gaps": lambda: torch.randn(4, 12)[:, ::2].t(),
    "transposed": lambda: torch.randn(4, 6).t(),
    "complex columns": lambda: torch.randn(6, 8, dtype=torch.complex64)[:, ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_parameter_in_any_layout_trains_as_by_torchs_loop(part: str) -> None:
    """Fused kernels walk over memory: they would train a part of a larger tensor wrongly."""
    for name in ("sgd", "adam", "adamw"):
        ends = []
        for fused in (None, False):
            module = nn.Module()
            torch.manual_seed(0)
            module.part = nn.Parameter(PARTS[part]())
            optimizer = build_optimizer(OptimizerConfig(name, lr=0.05, fused=fused), module)
            for step in range(3):
                (module.part - step).abs().square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(module.part.detach())
        torch.testing.assert_close(*ends)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gradients_that_a_hook_lays_out_otherwise_train_alike(name: str) -> None:
    def transpose(run: Any) -> None:
        weight = run.task.line.weight
        weight.grad = weight.grad.t().contiguous().t()

    def trained(optimizer: Any, *hooks: Any) -> Tensor:
        task = Regression(optimizer)
        task.line = nn.Linear(4, 6)
        quiet(max_epochs=1, callbacks=[LambdaCallback(on_before_optimizer_step=each) for each in hooks]).fit(
            task, [(torch.randn(4, 4), torch.zeros(4, 6)) for _ in range(3)]
        )
        return task.line.weight.detach()

    ends = []
    for hooks in ((), (transpose,)):
        torch.manual_seed(0)
        ends.append(trained(OptimizerConfig(name, lr=0.05), *hooks))
    torch.testing.assert_close(*ends)
    with pytest.raises(ConfigError, match="has other strides than its parameter"):
        trained(lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True), transpose)


class Means(TaskModule):  # returns a planted loss, and a planted value beside it
    double = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        loss = batch["loss"].mean()
        return {"loss": loss + self.zero * 0, "double": self.double * loss}

    def validation_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return self.training_step(batch)

    def loss_weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(batch["weight"].sum())


def planted(losses: Sequence[float], sizes: Sequence[int] | None = None) -> list[dict[str, Tensor]]:
    both = zip(losses, sizes or [1] * len(losses), strict=True)
    return [{"loss": torch.full((2,), loss), "weight": torch.tensor([float(size)])} for loss, size in both]


def test_logged_values_are_weighted_means() -> None:
    points: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: points.append(dict(run.logged)))
    trainer = quiet(max_epochs=1, log_every="2 steps", gradient_accumulation_steps=2, callbacks=[note])
    train = planted([1.0, 2.0, 4.0, 8.0, 16.0], [1, 3, 2, 1, 5])
    trainer.fit(Means(), train, planted([3.0, 5.0], [1, 7]))
    first = (1 * 1 + 2 * 3 + 4 * 2 + 8 * 1) / 7
    assert points == [
        {"train/loss": first, "train/double": 2 * first},
        {"validation/loss": (3 + 35) / 8, "validation/double": (3 + 35) / 4},
        {"train/loss": 16.0, "train/double": 32.0},
    ]


@pytest.mark.parametrize(("value", "accumulation"), [(math.nan, 1), (math.inf, 2)])
def test_a_loss_that_is_no_number_is_an_error_that_names_its_step(value: float, accumulation: int) -> None:
    losses = [1.0] * 8
    losses[5] = value
    trainer = quiet(max_epochs=1, log_every=1, gradient_accumulation_steps=accumulation)
    with pytest.raises(NonFiniteError, match=f"step {5 // accumulation} on rank 0.*'loss'") as caught:
        trainer.fit(Means(), planted(losses))
    assert any("after step" in note for note in caught.value.__notes__)


def test_a_loss_of_nan_is_found_in_an_interval_that_is_never_full_and_when_steps_are_left() -> None:
    for log_every in (None, "1000 steps"):
        with pytest.raises(NonFiniteError, match="step 2 "):
            quiet(max_epochs=1, log_every=log_every).fit(Means(), planted([1.0, 1.0, math.nan, 1.0]))

    def leave() -> None:
        steps = quiet(max_epochs=1).steps(Means(), planted([1.0, math.nan, 1.0]))
        next(steps), next(steps)
        steps.close()

    with pytest.raises(NonFiniteError, match="step 1 "):
        leave()


def test_a_loss_of_nan_is_never_saved_in_a_checkpoint(tmp_path: Path) -> None:
    options = {"checkpoint": CheckpointConfig(every="1 step"), "run_dir": tmp_path}
    with pytest.raises(NonFiniteError, match="step 2 "):
        quiet(max_epochs=1, log_every=None, **options).fit(Means(), planted([1.0, 1.0, math.nan, 1.0, 1.0]))
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000001", "step-00000002"]
    assert not (tmp_path / "model.safetensors").exists()
