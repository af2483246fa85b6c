"""The promises of exactness within one process: accumulation, rates, clipping, means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.tasks import PADDING, Duel, NextToken, Regression, duels, pairs, quiet, ragged
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import (
    CheckpointConfig,
    DataError,
    LambdaCallback,
    NonFiniteError,
    OptimizerConfig,
    TaskModule,
)
from drivetrain.task.optim.build import build_schedule

SPLITS = [(4, 2), (2, 4), (1, 8)]
"""Batch size and micro-batches per window; each makes a window of 8 samples."""

UPDATERS = {
    "sgd": (OptimizerConfig("sgd", lr=0.5, momentum=0.9), None),
    "adamw": (OptimizerConfig("adamw", lr=0.05, schedule="cosine", warmup_steps=1), None),
    "clipped": (OptimizerConfig("sgd", lr=0.5), 0.05),
}


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest difference between two sets of tensors, relative to the norm of each tensor."""
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def gradient_recorder(task: TaskModule, seen: list[dict[str, Tensor]]) -> LambdaCallback:
    def record(run: Any) -> None:
        seen.append({n: p.grad.clone() for n, p in task.named_parameters() if p.grad is not None})

    return LambdaCallback(on_before_optimizer_step=record)


def train_tokens(
    batch_size: int, accumulation: int, how: str, precision: str = "32"
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[float]]:
    """The weights after an epoch of 22 sequences, windows of 8, 8 and 6; each update's gradient and loss."""
    optimizer, max_grad_norm = UPDATERS[how]
    task = NextToken(optimizer)
    gradients: list[dict[str, Tensor]] = []
    trainer = quiet(
        max_epochs=1,
        precision=precision,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=max_grad_norm,
        callbacks=[gradient_recorder(task, gradients)],
    )
    data = DataLoader(ragged(), batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]
    losses = [step.loss for step in trainer.steps(task, data)]
    return dict(task.state_dict()), gradients, losses


@pytest.mark.parametrize("how", UPDATERS)
@pytest.mark.parametrize("split", SPLITS, ids=["2 of 4", "4 of 2", "8 of 1"])
def test_accumulation_equals_the_big_batch_on_a_ragged_token_loss(how: str, split: tuple[int, int]) -> None:
    whole, gradients, losses = train_tokens(8, 1, how)
    parts, split_gradients, split_losses = train_tokens(*split, how)
    assert len(gradients) == len(split_gradients) == 3
    # Before the first update the weights are the same, so that only the summing differs.
    assert largest_difference(split_gradients[0], gradients[0]) < 1e-6
    assert split_losses == pytest.approx(losses, rel=1e-6)
    if how != "adamw":  # which divides a gradient by its own size, so that a last bit of float32 may grow
        assert largest_difference(parts, whole) < 1e-6


@pytest.mark.parametrize("how", UPDATERS)
@pytest.mark.parametrize("split", SPLITS, ids=["2 of 4", "4 of 2", "8 of 1"])
def test_the_whole_epoch_agrees_with_its_short_last_window(how: str, split: tuple[int, int]) -> None:
    """In double precision, where no rounding can hide a wrong weight or excuse one."""
    whole, gradients, _ = train_tokens(8, 1, how, "64")
    parts, split_gradients, _ = train_tokens(*split, how, "64")
    assert largest_difference(parts, whole) < 1e-12
    for mine, right in zip(split_gradients, gradients, strict=True):
        assert largest_difference(mine, right) < 1e-12


def test_a_micro_batch_without_a_token_contributes_nothing() -> None:
    """Its own loss is a mean over nothing, 0 / 0."""
    samples = ragged(8)
    assert bool((samples[3]["tokens"] == PADDING).all())
    results = []
    for data in (samples, [each for number, each in enumerate(samples) if number != 3]):
        task = NextToken(OptimizerConfig("sgd", lr=0.5))
        loader = DataLoader(data, batch_size=1)  # type: ignore[arg-type]
        (step,) = quiet(max_epochs=1, gradient_accumulation_steps=8).steps(task, loader)
        results.append((weights(task), step.loss))
    assert results[0] == results[1]


def test_a_window_without_a_token_is_skipped() -> None:
    task = NextToken(OptimizerConfig("adamw", lr=0.5, schedule="linear"))
    nothing = {"tokens": torch.full((2, 5), PADDING)}
    something = {"tokens": torch.arange(10).reshape(2, 5) % 3 + 1}
    other = NextToken(OptimizerConfig("adamw", lr=0.5, schedule="linear", total_steps=4))
    other.load_state_dict(task.state_dict())
    result = quiet(max_epochs=2, log_every=1).fit(task, [nothing, something])
    assert (result.progress.updates, result.progress.skipped) == (2, 2)
    without = quiet(max_epochs=2, log_every=1).fit(other, [something])
    assert weights(task) == weights(other)
    assert result.metrics["train/loss"] == without.metrics["train/loss"]


def test_an_epoch_without_anything_to_learn_from_is_an_error() -> None:
    task = NextToken(OptimizerConfig("sgd"))
    nothing = [{"tokens": torch.full((2, 5), PADDING)}]
    with pytest.raises(DataError, match=r"epoch 0 made no update.*NextToken\.loss_weight gave 0"):
        quiet(max_steps=2).fit(task, nothing)


def test_a_generator_step_that_never_yields_is_an_error() -> None:
    class Silent(Duel):
        def training_step(self, batch: Any) -> Any:
            if False:
                yield

    with pytest.raises(DataError, match=r"never.*yielded an optimizer's name"):
        quiet(max_steps=2).fit(Silent(), DataLoader(duels(), batch_size=4))  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [(4, 2), (1, 8)], ids=["2 of 4", "8 of 1"])
def test_accumulation_equals_the_big_batch_with_two_optimizers(split: tuple[int, int]) -> None:
    def train(batch_size: int, accumulation: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        task = Duel()
        loader = DataLoader(duels(), batch_size=batch_size)  # type: ignore[arg-type]
        trainer = quiet(
            max_epochs=3, precision="64", gradient_accumulation_steps=accumulation, max_grad_norm=0.1
        )
        return dict(task.state_dict()), trainer.fit(task, loader).metrics

    (whole, values), (parts, split_values) = train(8, 1), train(*split)
    assert largest_difference(parts, whole) < 1e-12
    # The spread is a statistic of each batch and not a mean over samples.
    for name in ("train/discriminator_loss", "train/generator_loss"):
        assert split_values[name] == pytest.approx(values[name], rel=1e-12)


# Rates, norms, means.


@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt", "warmup_stable_decay"])
def test_the_rate_at_an_update_does_not_depend_on_accumulation(schedule: str) -> None:
    def rates(batch_size: int, accumulation: int) -> list[float]:
        seen: list[float] = []
        optimizer = OptimizerConfig("sgd", lr=0.1, schedule=schedule, warmup_steps=2)
        note = LambdaCallback(on_before_optimizer_step=lambda run: seen.append(run.learning_rates()["lr"]))
        trainer = quiet(max_epochs=2, gradient_accumulation_steps=accumulation, callbacks=[note])
        trainer.fit(Regression(optimizer), pairs(22, batch_size))
        return seen

    right = rates(8, 1)
    factor = build_schedule(OptimizerConfig("sgd", lr=0.1, schedule=schedule, warmup_steps=2), 6)
    assert factor is not None
    assert right == pytest.approx([0.1 * factor(update) for update in range(6)])
    assert rates(4, 2) == rates(1, 8) == right


def test_clipping_uses_the_norm_over_all_parameters_and_reports_it() -> None:
    task = NextToken(OptimizerConfig("sgd", lr=1.0))
    before = {name: value.clone() for name, value in task.state_dict().items()}
    gradients: list[dict[str, Tensor]] = []
    trainer = quiet(max_steps=1, max_grad_norm=0.01, callbacks=[gradient_recorder(task, gradients)])
    (step,) = trainer.steps(task, DataLoader(ragged(8), batch_size=8))  # type: ignore[arg-type]
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients[0].values()))
    assert norm > 0.01
    assert step.grad_norm is not None
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-6)
    moved = math.sqrt(
        sum(float((before[n] - v).double().square().sum()) for n, v in task.state_dict().items())
    )
    assert moved == pytest.approx(0.01, rel=1e-3)  # a learning rate of 1 moves by the clipped gradient


def test_clipping_sees_gradients_without_their_loss_scale() -> None:
    batch = next(iter(pairs()))

    def first_norm(precision: str) -> float:
        steps = quiet(max_steps=1, max_grad_norm=1e9, precision=precision).steps(Regression(), [batch])
        (applied,) = [step for step in steps if step.applied]
        assert applied.grad_norm is not None
        return float(applied.grad_norm)

    # The scale of 2**16 or a little less would stand between them; the rest is what 16 bits round.
    assert first_norm("16-mixed") == pytest.approx(first_norm("32"), rel=0.01)


class Means(TaskModule):
    """Returns a planted loss, and a planted value beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"loss": batch["loss"].mean() + self.zero * 0, "double": 2 * batch["loss"].mean()}

    def validation_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        return self.training_step(batch)

    def loss_weight(self, batch: Mapping[str, Tensor]) -> float:
        return float(batch["weight"].sum())


def planted(losses: Sequence[float], sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    return [
        {"loss": torch.full((2,), loss), "weight": torch.tensor([float(size)])}
        for loss, size in zip(losses, sizes, strict=True)
    ]


def test_logged_values_are_weighted_means() -> None:
    losses, sizes = [1.0, 2.0, 4.0, 8.0, 16.0], [1, 3, 2, 1, 5]
    points: list[dict[str, float]] = []
    trainer = quiet(
        max_epochs=1,
        log_every="2 steps",
        gradient_accumulation_steps=2,
        callbacks=[LambdaCallback(on_log=lambda run: points.append(dict(run.logged)))],
    )
    trainer.fit(Means(), planted(losses, sizes), planted([3.0, 5.0], [1, 7]))
    first = (1 * 1 + 2 * 3 + 4 * 2 + 8 * 1) / 7
    assert points == [
        {"train/loss": first, "train/double": 2 * first},
        {"validation/loss": (3 + 35) / 8, "validation/double": (3 + 35) / 4},
        {"train/loss": 16.0, "train/double": 32.0},
    ]


# A loss that is no number.


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_is_no_number_is_an_error_that_names_its_update(value: float, accumulation: int) -> None:
    losses = [1.0] * 8
    losses[5] = value
    trainer = quiet(max_epochs=1, log_every=1, gradient_accumulation_steps=accumulation)
    with pytest.raises(NonFiniteError, match=f"update {5 // accumulation} on rank 0.*'loss'") as caught:
        trainer.fit(Means(), planted(losses, [1] * 8))
    assert any("after update" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("log_every", [None, "1000 steps"])
def test_it_is_found_in_a_last_interval_that_is_never_full(log_every: str | None) -> None:
    losses = [1.0, 1.0, math.nan, 1.0]
    with pytest.raises(NonFiniteError, match="update 2 "):
        quiet(max_epochs=1, log_every=log_every).fit(Means(), planted(losses, [1] * 4))


def test_it_is_never_saved_in_a_checkpoint(tmp_path: Path) -> None:
    losses = [1.0, 1.0, math.nan, 1.0, 1.0]
    trainer = quiet(
        max_epochs=1, log_every=None, checkpoint=CheckpointConfig(every="1 step"), run_dir=tmp_path
    )
    with pytest.raises(NonFiniteError, match="update 2 "):
        trainer.fit(Means(), planted(losses, [1] * 5))
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("update-*"))
    assert saved == ["update-00000001", "update-00000002"]
    assert not (tmp_path / "model.safetensors").exists()


def test_leaving_a_loop_of_ones_own_does_not_hide_it() -> None:
    def leave() -> None:
        steps = quiet(max_epochs=1).steps(Means(), planted([1.0, math.nan, 1.0], [1] * 3))
        next(steps), next(steps)
        steps.close()

    with pytest.raises(NonFiniteError, match="update 1 "):
        leave()


def test_a_validation_loss_that_is_no_number_is_shown_and_skipped_if_wished() -> None:
    trainer = quiet(max_epochs=2, on_nonfinite="skip")
    result = trainer.fit(Means(), planted([1.0], [1]), planted([math.nan, 1.0], [1, 1]))
    assert result.progress.updates == 2
    assert math.isnan(result.metrics["validation/loss"])


def test_a_planted_nan_in_an_extra_value_is_logged_as_such() -> None:
    class Odd(Means):
        def training_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
            return {**super().training_step(batch), "double": math.nan}

    result = quiet(max_epochs=1).fit(Odd(), planted([1.0], [1]))
    assert math.isnan(result.metrics["train/double"])
