"""A task's own callbacks, values that it leaves out, steps that return None, and steps that make updates."""

from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import LambdaCallback, TaskModule


class Line(TaskModule):
    may_skip = True

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.skipped = skipped
        self.stages: list[str] = []

    def training_step(self, batch: Tensor) -> Any:
        return None if int(batch[0, 0]) in self.skipped else F.mse_loss(self.net(batch), batch[:, :1])

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.001)

    def metric_name(self, stage: str, loader: str | None, name: str) -> str | None:
        return None

    def run_callbacks(self, stage: str) -> list[Any]:
        self.stages.append(stage)
        return [LambdaCallback(on_log=lambda run: run.log("own", 1.0))]


def batches() -> list[Tensor]:
    return [torch.full((2, 2), float(number)) for number in range(6)]


def fit(task: TaskModule, **options: Any) -> Any:
    return quiet(**{"max_epochs": 1, "log_every": 2, **options}).fit(task, batches())


def by_hand(windows: list[list[int]]) -> Tensor:
    net, data = Line().net, batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for window in windows:
        x = torch.cat([data[number] for number in window])
        F.mse_loss(net(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


def test_a_task_has_run_callbacks_of_its_own_and_leaves_values_out() -> None:
    points: list[float] = []
    note = LambdaCallback(on_log=lambda run: points.append(run.progress.updates))
    result = fit(task := Line(), callbacks=[note])
    assert (task.stages, points, result.metrics) == (["train"], [2, 4, 6], {"own": 1.0})


@pytest.mark.parametrize(
    ("accumulation", "skipped", "windows", "count"),
    [(1, (1, 4), [[0], [2], [3], [5]], 2), (3, (1, 3, 4, 5), [[0, 2]], 1)],
)
def test_a_training_step_that_returns_none_weighs_nothing(
    accumulation: int, skipped: tuple[int, ...], windows: list[list[int]], count: int
) -> None:
    result = fit(task := Line(skipped), gradient_accumulation_steps=accumulation)
    torch.testing.assert_close(task.net.weight.detach(), by_hand(windows), rtol=0, atol=1e-6)
    assert (result.progress.updates, result.progress.skipped) == (len(windows), count)


def on_a_rank(skipped: tuple[int, ...]) -> tuple[Any, ...]:
    """The weights and updates of a task that skips, and the collectives that a task pays for that it may."""
    result = fit(task := Line(skipped), strategy="ddp")
    counts: dict[str, list[int]] = {}
    reduce = torch.distributed.all_reduce
    try:
        for strategy in ("ddp", "fsdp"):
            for may_skip in (True, False):
                made = counts.setdefault(strategy, [])
                made.append(0)

                def counted(*args: Any, made: list[int] = made, **options: Any) -> Any:
                    made[-1] += 1
                    return reduce(*args, **options)

                torch.distributed.all_reduce = counted
                other = Line()
                other.may_skip = may_skip
                fit(other, strategy=strategy, max_epochs=2)
    finally:
        torch.distributed.all_reduce = reduce
    return task.net.weight.tolist(), result.progress.updates, result.progress.skipped, counts


def test_ranks_whose_steps_return_none_agree_for_one_exchange_an_update_and_none_where_sharded() -> None:
    first, second = on_two_ranks(on_a_rank, (1, 4, 5))
    assert first == second
    weights, updates, skipped, counts = first
    assert (updates, skipped) == (2, 1)
    torch.testing.assert_close(torch.tensor(weights), by_hand([[0], [2, 3]]), rtol=0, atol=1e-6)
    assert counts["ddp"][0] - counts["ddp"][1] == 6, "of six updates"
    assert counts["fsdp"][0] == counts["fsdp"][1]


class Own(TaskModule):  # makes two updates for each batch
    makes_updates = True

    def __init__(self) -> None:
        super().__init__()
        self.net = Line().net
        self.engine: Any = None

    def run_callbacks(self, stage: str) -> list[Any]:
        return [LambdaCallback(on_fit_start=lambda run: setattr(self, "engine", run.engine))]

    def training_step(self, batch: Tensor) -> Any:
        for _ in range(2):
            self.net.zero_grad()
            F.mse_loss(self.net(batch), batch[:, :1]).backward()
            assert self.engine.update_inside("first")
        return {"loss": 0.0}
        yield

    def configure_optimizers(self) -> Any:
        return {"first": lambda parameters: torch.optim.SGD(parameters, lr=0.001)}


def test_a_training_step_may_make_its_updates_itself() -> None:
    result = fit(task := Own())
    assert result.progress.updates == 6
    right = by_hand([[number] for number in range(6) for _ in range(2)])
    torch.testing.assert_close(task.net.weight.detach(), right, rtol=0, atol=1e-6)
