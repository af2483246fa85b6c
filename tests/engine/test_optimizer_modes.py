"""Optimizers that evaluate and save other weights than they train: those with methods `train` and `eval`."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor
from torch.optim import Optimizer

from drivetrain import ConfigError, LambdaCallback, OptimizerConfig, StrategyError, WeightAverage
from drivetrain.checkpoint.weights.load import load_weights
from drivetrain.engine.optimizer_modes import OptimizerModes
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.precision.registry import as_precision


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al., arXiv 2405.15682): gradients at y, steps of z, evaluations at x."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    def train(self) -> None:
        self._move(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _move(self, training: bool, share: Any) -> None:
        for group in self.param_groups:
            for each in group["params"] if group["training"] is not training else ():
                if "z" in self.state[each]:
                    each.lerp_(self.state[each]["z"], share(group["beta"]))
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            share, beta, lr = 1 / group["k"], group["beta"], group["lr"]
            for each in group["params"]:
                z = self.state[each].setdefault("z", each.clone())
                each.lerp_(z, share).add_(each.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(each.grad, alpha=lr)


def kind_named(name: str) -> Any:
    return ScheduleFree if name == "ours" else getattr(pytest.importorskip("schedulefree"), name)


def by_hand(kind: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after two epochs, and the losses of a validation after each."""
    task, losses = Regression(), []
    optimizer = kind([{"params": [each]} for each in task.parameters()], lr=0.05)
    for _ in range(2):
        optimizer.train()
        for batch in pairs():
            optimizer.zero_grad()
            task.loss(task(batch[0]), batch).backward()
            optimizer.step()
        trained = {name: value.clone() for name, value in task.state_dict().items()}
        optimizer.eval()
        evaluated = {name: value.clone() for name, value in task.state_dict().items()}
        (batch,) = pairs(4, 4)
        losses.append(task.loss(task(batch[0]), batch).item())
        optimizer.train()
        task.load_state_dict(trained)  # without the rounding of eval and train
    return evaluated, losses


@pytest.mark.parametrize("name", ["ours", "AdamWScheduleFree"])
def test_validations_checkpoints_and_the_finished_task_have_eval_weights(name: str, tmp_path: Path) -> None:
    kind, losses, gathered = kind_named(name), [], []

    def note(run: Any) -> None:
        losses.append(run.metrics["validation/loss"])

    def sample(run: Any) -> None:
        with run.gathered() as task:
            gathered.append(weights(task))

    def fit(folder: str, epochs: int, **options: Any) -> Any:
        task = Regression(OptimizerConfig(kind, lr=0.05))
        notes = [LambdaCallback(on_evaluation_end=note, on_epoch_end=sample)]
        given = {"checkpoint": True, "run_dir": tmp_path / folder, "callbacks": notes}
        return task, quiet(max_epochs=epochs, **given).fit(task, pairs(), pairs(4, 4), **options)

    task, result = fit("whole", 2)
    wanted, wanted_losses = by_hand(kind)
    assert weights(task) == gathered[-1]
    torch.testing.assert_close(dict(task.state_dict()), wanted, rtol=0, atol=1e-6)
    assert losses == pytest.approx(wanted_losses, abs=1e-6)
    for path in (result.model_path, result.last_checkpoint):
        assert {name: value.tolist() for name, value in load_weights(path).items()} == {
            name: value.tolist() for name, value in task.state_dict().items()
        }
    fit("parts", 1)
    again, _ = fit("parts", 2, resume="auto")
    assert weights(again) == weights(task)


def on_a_rank(folder: Path) -> list[tuple[dict[str, Tensor], float]]:
    found = []
    for strategy in ("ddp", "fsdp"):
        for epochs, resume in ((1, None), (2, "auto")):
            task = Regression(OptimizerConfig(ScheduleFree, lr=0.05))
            options: dict[str, Any] = {"strategy": strategy, "devices": 2, "checkpoint": True}
            trainer = quiet(max_epochs=epochs, run_dir=folder / strategy, **options)
            result = trainer.fit(task, pairs(batch_size=1), pairs(4, 2), resume=resume)
        found.append((dict(task.state_dict()), result.metrics["validation/loss"]))
    return found


def test_ranks_evaluate_and_finish_with_them_too(tmp_path: Path) -> None:
    wanted, losses = by_hand(ScheduleFree)
    for found in on_two_ranks(on_a_rank, tmp_path):
        for state, loss in found:
            torch.testing.assert_close(state, wanted, rtol=0, atol=1e-6)
            assert loss == pytest.approx(losses[-1], abs=1e-6)


def test_an_error_in_an_evaluation_leaves_the_trained_weights() -> None:
    seen: list[Any] = []

    def fail(run: Any) -> None:
        raise ValueError("of the user's")

    notes = LambdaCallback(on_step_end=lambda run: seen.append(weights(run.task)), on_evaluation_end=fail)
    task = Regression(OptimizerConfig(ScheduleFree))
    with pytest.raises(ValueError, match="of the user's"):
        quiet(max_epochs=1, callbacks=[notes], sanity_validation=None).fit(task, pairs(), pairs(4))
    assert weights(task) == seen[-1]


def test_refusals_of_optimizers_with_modes() -> None:
    def fit(**options: Any) -> Any:
        task = Regression(OptimizerConfig(ScheduleFree))
        return lambda: quiet(max_epochs=1, **options).fit(task, pairs())

    class OwnWeights(SingleDevice):
        refusals: ClassVar = {"averages": "it keeps weights of its own"}

    made = [ScheduleFree(Regression().parameters())]
    cases: dict[str, tuple[Any, ...]] = {
        "an average": (fit(callbacks=[WeightAverage()]), "ScheduleFree", "Leave WeightAverage out"),
        "copies": (fit(precision="bf16-true"), "updates='nearest'"),
        "a strategy": (
            lambda: OptimizerModes(made, OwnWeights("cpu"), as_precision("32")),
            "it keeps weights of its own",
            "'fsdp'",
        ),
    }
    assert_refused((ConfigError, StrategyError), cases)
