"""`TaskModule.optimize`: a task that makes its optimizer steps itself."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import ConfigError, TaskModule
from drivetrain.task.output import Optimized

RATE = 0.05


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


class Sharp(Regression):  # sharpness-aware minimisation: the gradient a little uphill moves the weights
    def __init__(self) -> None:
        super().__init__(sgd)

    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        engine.accumulate(weighted_batches)
        trained = engine.parameters
        gradients = [each.grad for each in trained]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        with torch.no_grad():
            uphill = [0.1 * each / norm for each in gradients]
            torch._foreach_add_(trained, uphill)
            for each in trained:
                each.grad = None
        step_values, _ = engine.accumulate(weighted_batches)
        with torch.no_grad():
            torch._foreach_sub_(trained, uphill)
        applied, norm = engine.update(engine.optimizer, step_values, trained)
        return Optimized(step_values, applied, norm)


def by_hand(batch: int) -> Tensor:
    task = Regression()
    weights = [*task.parameters()]
    for features, target in pairs(8, batch):
        loss = task.loss(task(features), (features, target))
        gradients = torch.autograd.grad(loss, weights)
        norm = torch.stack([each.norm() for each in gradients]).norm()
        moved = {n: p + 0.1 * g / norm for (n, p), g in zip(task.named_parameters(), gradients, strict=True)}
        outputs = torch.func.functional_call(task, moved, (features,))
        gradients = torch.autograd.grad(task.loss(outputs, (features, target)), weights)
        with torch.no_grad():
            for each, gradient in zip(weights, gradients, strict=True):
                each -= RATE * gradient
    return task.line.weight.detach()


def fit(task: TaskModule, batch: int = 4, **options: Any) -> Any:
    return quiet(**{"max_epochs": 1, **options}).fit(task, pairs(8, batch))


def on_a_rank() -> tuple[Any, int]:
    result = fit(task := Sharp(), batch=2, strategy="ddp")
    return task.line.weight.tolist(), result.progress.steps


def test_a_task_may_make_a_step_of_two_backwards_with_any_split_of_the_batch() -> None:
    whole, split = Sharp(), Sharp()
    assert fit(whole).progress.steps == 2
    assert fit(split, batch=2, gradient_accumulation_steps=2).progress.samples == 8
    torch.testing.assert_close(whole.line.weight.detach(), by_hand(4), rtol=0, atol=1e-6)
    torch.testing.assert_close(split.line.weight, whole.line.weight, rtol=0, atol=1e-6)
    first, second = on_two_ranks(on_a_rank)
    assert first == second
    torch.testing.assert_close(torch.tensor(first[0]), by_hand(4), rtol=0, atol=1e-6)


class Several(Regression):  # two steps of one optimizer and one of another for each batch
    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        for name in ("weight", "bias", "weight"):
            step_values, _ = engine.accumulate(weighted_batches)
            applied, _ = engine.update(engine.updaters[name], step_values, engine.parameters)
        return Optimized(step_values, applied)

    def configure_optimizers(self) -> Any:
        return {"weight": lambda _: sgd([self.line.weight]), "bias": lambda _: sgd([self.line.bias])}


def test_a_task_may_step_several_optimizers_in_its_order() -> None:
    result = fit(task := Several())
    assert (result.progress.steps, result.metrics.keys()) == (2, {"train/loss"})
    other = Regression()
    for features, target in pairs(8, 4):
        for each in (other.line.weight, other.line.bias, other.line.weight):
            (gradient,) = torch.autograd.grad(other.loss(other(features), (features, target)), each)
            with torch.no_grad():
                each -= RATE * gradient
    torch.testing.assert_close(task.line.weight, other.line.weight, rtol=0, atol=1e-6)


class Plain(Regression):
    def optimize(self, engine: Any, weighted_batches: Any) -> Optimized:
        return super().optimize(engine, weighted_batches)


def test_the_default_is_the_engines_own_step_and_parts_of_batches_are_refused() -> None:
    task, other = Plain(), Regression()
    assert fit(task).metrics == fit(other).metrics
    assert torch.equal(task.line.weight, other.line.weight)
    with pytest.raises(ConfigError, match=r"micro_batch with Plain\.optimize: .* gradient_accumulation"):
        fit(Plain(), micro_batch=1)
