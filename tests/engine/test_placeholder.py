"""Placeholders, which run in place of a micro-batch without weight: nothing of them stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule

SIZE = 48  # six rounds of two batches of four


class Numbers(Dataset[dict[str, Tensor]]):  # samples with their numbers; those of `bad` cannot be read
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if number in self.bad:
            raise OSError(f"sample {number} is cut short")
        x = torch.tensor([number / SIZE, number * 7 % SIZE / SIZE, 1.0])
        return {"x": x, "number": torch.tensor(number)}


class Normed(TaskModule):
    """A model with a batch norm and dropout; its loss is NaN for a batch seen again once it is `spoiled`."""

    weightless: tuple[int, ...] = (25,)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.spoiled = False
        self.learned: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss = (outputs - 1).square().mean()
        first = int(batch["number"][0])
        again, self.learned = first in self.learned, self.learned | {first}
        return loss * torch.nan if self.spoiled and again else loss

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("adamw", lr=0.05)


class Weighed(Normed):  # likewise, with a weight for each batch: zero for those with a sample of `weightless`
    def loss_weight(self, batch: Any) -> int:
        return 0 if torch.isin(batch["number"], torch.tensor(self.weightless)).any() else len(batch["number"])


class Yielding(Normed):
    """Likewise, by a generator whose second loss is led back through the forward of the first."""

    def training_step(self, batch: Any) -> Any:
        middle = self.body(batch["x"])
        yield "head", (self.head(middle.detach()) - 1).square().mean()
        yield "body", self.loss(self.head(middle), batch)

    def configure_optimizers(self) -> Any:
        return {"head": OptimizerConfig("sgd", lr=0.05), "body": OptimizerConfig("sgd", lr=0.05)}


def fitted(task: TaskModule, data: Dataset[Any], resume: str | None = None, **options: Any) -> Any:
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "on_bad_batch": "skip", **options}
    with heard("the batch is left out"):
        return quiet(**options).fit(task, DataLoader(data, batch_size=4), resume=resume)


def spoiled(kind: type[Normed], options: dict[str, Any]) -> tuple[bool, int]:
    task = kind()

    def spoil(run: Any) -> None:
        task.spoiled = run.progress.steps >= 3

    callbacks = [LambdaCallback(on_step_start=spoil)]
    result = fitted(task, Numbers(bad=(30,)), log_every="1 step", callbacks=callbacks, **options)
    return all(bool(each.isfinite().all()) for each in task.state_dict().values()), result.progress.steps


@pytest.mark.parametrize(("kind", "options"), [(Normed, {"micro_batch": 2}), (Yielding, {})])
def test_placeholder_may_have_a_loss_of_nan(kind: type[Normed], options: dict[str, Any]) -> None:
    assert on_two_ranks(spoiled, kind, options) == [(True, 6)] * 2


def resumed(kind: type[Normed], run_dir: Path, options: dict[str, Any]) -> tuple[list[Any], int]:
    policy = CheckpointConfig(every="1 step", keep_last=None, by=None)
    data = Numbers(bad=() if kind is Weighed else (25,))
    tasks = [kind() for _ in range(2)]
    fitted(tasks[0], data, run_dir=run_dir / "whole", checkpoint=policy, **options)
    saved = sorted(map(str, (run_dir / "whole" / "checkpoints").glob("step-*")))
    middle = saved[len(saved) // 2 - 1]  # before the step that has a placeholder
    fitted(tasks[1], data, run_dir=run_dir / "resumed", checkpoint=policy, resume=middle, **options)
    states = [{name: each.tolist() for name, each in task.state_dict().items()} for task in tasks]
    return states, int(tasks[0].body[0].num_batches_tracked)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Normed, {"micro_batch": 4}), (Weighed, {}), (Yielding, {"gradient_accumulation_steps": 3})],
)
def test_placeholder_leaves_buffers_so_a_resume_is_exact(kind: Any, options: Any, tmp_path: Path) -> None:
    """Rank 0, whose buffers are saved, has nothing to learn from in the fourth round."""
    (states, counted), _ = on_two_ranks(resumed, kind, tmp_path, options)
    assert states[0] == states[1]
    assert counted == 5, "one of six rounds does not count"


class OverNothing(Weighed):  # whose loss of a batch without weight is 0 / 0, and so is its gradient
    weightless = tuple(range(4, 8))  # rank 1's first batch, when it has run none yet

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 8))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        counted = self.loss_weight(batch)
        return (outputs - 1).square().sum() * (counted > 0) / torch.tensor(float(counted))


def over_nothing(strategy: str) -> list[Tensor]:
    task = OverNothing()
    fitted(task, Numbers(), strategy=strategy)
    return [each.detach().clone() for each in task.state_dict().values()]


def test_placeholder_of_a_mean_over_nothing_adds_a_gradient_of_zero() -> None:
    right = on_two_ranks(over_nothing, "ddp")
    for ours, ddps in zip(on_two_ranks(over_nothing, "fsdp"), right, strict=True):
        for one, other in zip(ours, ddps, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert one.isfinite().all()
