"""The window of one update: the shares of its micro-batches, its report, and what generators may yield."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import ConfigError, NonFiniteError, StepOutput
from drivetrain.data import MicroBatch, Transfer
from drivetrain.engine.generator_step import named
from drivetrain.engine.placeholder import Placeholders
from drivetrain.engine.weighting import StepResult, weigh


def window(*weights: float | Tensor) -> list[MicroBatch]:
    return [MicroBatch(number, weight) for number, weight in enumerate(weights)]


def shares(*weights: float | Tensor) -> list[tuple[int, float | Tensor | None]]:
    """The number of each micro-batch that is kept, and its share."""
    pairs, _ = weigh(window(*weights), None, Placeholders(Transfer(torch.device("cpu"))))
    return [(micro_batch.batch, share) for micro_batch, share in pairs]


# Shares.


def test_shares_are_proportional_to_the_weights_and_add_up_to_one() -> None:
    assert shares(4, 4) == [(0, 0.5), (1, 0.5)]
    assert shares(6, 2) == [(0, 0.75), (1, 0.25)]
    assert sum(share for _, share in shares(3, 5, 7.5, 1) if isinstance(share, float)) == 1


def test_an_only_micro_batch_is_the_whole_whatever_its_weight() -> None:
    assert shares(8) == shares(0.25) == [(0, None)]


def test_a_micro_batch_of_weight_zero_is_left_out() -> None:
    assert shares(0) == []
    assert shares(0, 0.0) == []
    assert shares(0, 3, 0, 1) == [(1, 0.75), (3, 0.25)]
    assert shares(0, 5) == [(1, 1.0)]


def test_a_weight_on_an_accelerator_is_not_read() -> None:
    """A tensor on "meta" stands in for it: reading its value is an error."""
    there = torch.ones((), device="meta")
    with pytest.raises(RuntimeError):
        bool(there)
    assert shares(there) == [(0, None)]
    kept = shares(there, 2, there)
    assert [number for number, _ in kept] == [0, 1, 2]
    assert all(isinstance(share, Tensor) and share.device.type == "meta" for _, share in kept)


# What an update reports.


def test_an_updates_values_are_means_by_weight_over_its_micro_batches() -> None:
    steps = quiet(max_steps=1, gradient_accumulation_steps=3).steps(Regression(), pairs(5, batch_size=2))
    (step,) = steps
    task = Regression()
    samples = [task.training_step(batch).loss.item() for batch in pairs(5, batch_size=1)]
    assert step.update == 0
    assert step.applied
    assert step.grad_norm is None
    assert step.loss == pytest.approx(sum(samples) / 5, rel=1e-6)
    assert step.metrics == {"loss": step.loss}
    assert step.loss == step.loss, "reading it does not use it up"


def test_each_update_reports_its_own_values() -> None:
    class Counting(Regression):
        calls = 0

        def training_step(self, batch: Any) -> StepOutput:
            self.calls += 1
            return StepOutput(super().training_step(batch).loss, metrics={"call": self.calls})

    steps = quiet(max_epochs=1, gradient_accumulation_steps=2).steps(Counting(), pairs(10))
    assert [(step.update, step.metrics["call"]) for step in steps] == [(0, 1.5), (1, 3.5), (2, 5)]


def test_a_loss_that_is_no_number_is_not_reported_as_one() -> None:
    rows = [
        (("loss", "extra"), torch.tensor([1.0, 2.0]), 2),
        (("loss", "extra"), torch.tensor([math.nan, 0.0]), 2),
    ]
    with pytest.raises(NonFiniteError, match=r"at update 7.*'loss'"):
        _ = StepResult(rows, True, None, 7).loss  # type: ignore[arg-type]


def test_an_update_without_a_loss_says_what_it_has() -> None:
    trainer = quiet(max_steps=1)
    (step,) = trainer.steps(Duel(), DataLoader(duels(4), batch_size=4))  # type: ignore[arg-type]
    assert sorted(step.metrics) == ["discriminator_loss", "generator_loss", "spread"]
    with pytest.raises(ConfigError, match=r"this step has no value 'loss'.*'generator_loss', 'spread'"):
        _ = step.loss


# What generator steps yield and return.


def test_a_yielded_loss_is_named_after_its_optimizer_and_other_values_by_themselves() -> None:
    assert named("generator", "loss") == "generator_loss"
    assert named("generator", "realism") == "realism"


def train(body: Any, **options: Any) -> Any:
    """The first update of a task whose step is `body(task, batch)`."""

    class Own(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
            return (yield from body(self, batch))

    data = DataLoader(duels(6), batch_size=2)  # type: ignore[arg-type]
    (step,) = quiet(max_steps=1, **options).steps(Own(), data)
    return step


def spread(task: Duel, batch: Mapping[str, Tensor]) -> Tensor:
    return task.generator(batch["noise"]).std()


def test_a_generator_may_return_values_to_log_or_nothing() -> None:
    def returning(task: Duel, batch: Any) -> Iterator[Any]:
        yield "generator", spread(task, batch)
        return {"total": torch.tensor(3.0), "count": 2}

    def silent(task: Duel, batch: Any) -> Iterator[Any]:
        yield "generator", spread(task, batch)

    step = train(returning, gradient_accumulation_steps=3)
    assert step.metrics == {
        "generator_loss": pytest.approx(step.metrics["generator_loss"]),
        "total": 3,
        "count": 2,
    }
    assert list(train(silent).metrics) == ["generator_loss"]


def test_a_generator_may_return_a_total_named_loss() -> None:
    def totalling(task: Duel, batch: Any) -> Iterator[Any]:
        loss = spread(task, batch)
        yield "generator", loss
        return {"loss": loss * 2}

    step = train(totalling, gradient_accumulation_steps=3)
    assert step.loss == pytest.approx(2 * step.metrics["generator_loss"], rel=1e-6)


def test_a_yield_may_carry_further_values() -> None:
    def measuring(task: Duel, batch: Any) -> Iterator[Any]:
        loss = spread(task, batch)
        yield "generator", {"loss": loss, "realism": loss * 0 + 0.5}

    assert train(measuring).metrics["realism"] == 0.5


@pytest.mark.parametrize("returned", [3.0, torch.ones(()), [1], "loss"])
def test_a_generator_that_returns_something_else_is_told_what_it_may_return(returned: Any) -> None:
    def wrong(task: Duel, batch: Any) -> Iterator[Any]:
        yield "generator", spread(task, batch)
        return returned

    with pytest.raises(ConfigError, match=f"returned a {type(returned).__name__}; it may return a mapping"):
        train(wrong)


def test_bodies_of_one_window_must_yield_as_often_as_one_another() -> None:
    lengths = iter([2, 1])

    def uneven(task: Duel, batch: Any) -> Iterator[Any]:
        for _ in range(next(lengths)):
            yield "generator", spread(task, batch)

    with pytest.raises(ConfigError, match="must yield the same number of times"):
        train(uneven, gradient_accumulation_steps=2)


def test_bodies_of_one_window_must_name_the_same_optimizer() -> None:
    names = iter(["generator", "discriminator"])

    def mixed(task: Duel, batch: Any) -> Iterator[Any]:
        yield next(names), spread(task, batch)

    with pytest.raises(ConfigError, match=r"different optimizers \('generator' and 'discriminator'\)"):
        train(mixed, gradient_accumulation_steps=2)


def test_a_yield_without_a_loss_is_an_error() -> None:
    def lossless(task: Duel, batch: Any) -> Iterator[Any]:
        yield "generator", None

    with pytest.raises(ConfigError, match="returned no loss"):
        train(lossless)


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_a_body_may_name_the_same_optimizer_more_than_once(precision: str) -> None:
    """As adversarial training does, with several updates of one network for each of the other.

    The losses are small and in 32 bits, so that none overflows under the first loss scale.
    """
    before: list[Tensor] = []

    def repeating(task: Duel, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        for _ in range(3):
            before.append(task.generator.weight.detach().clone())
            yield "generator", task.generator(batch["noise"]).float().square().mean() * 0.01
        yield "discriminator", task.discriminator(batch["real"]).float().mean() * 0.01

    step = train(repeating, precision=precision)
    assert step.applied
    assert len(before) == 3
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[1], before[2])
