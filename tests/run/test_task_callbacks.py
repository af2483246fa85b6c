"""A task's own callbacks, values that it leaves out, and steps that return None."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import ConfigError, TaskModule, Trainer
from drivetrain.testing import run_distributed


class Line(TaskModule):
    may_skip = True

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.skipped = skipped
        self.stages: list[str] = []
        self.log_points = 0

    def training_step(self, batch: Tensor) -> Any:
        if int(batch[0, 0]) in self.skipped:
            return None
        return F.mse_loss(self.net(batch), batch[:, :1])

    def configure_optimizers(self) -> Any:
        return lambda parameters: torch.optim.SGD(parameters, lr=0.001)

    def metric_name(self, stage: str, loader: str | None, name: str) -> str | None:
        return None

    def run_callbacks(self, stage: str) -> list[Any]:
        self.stages.append(stage)
        return [_Counts(self)]


class _Counts:
    def __init__(self, task: Line) -> None:
        self.task = task

    def on_log(self, run: Any) -> None:
        self.task.log_points += 1
        run.log("own", 1.0)


def batches() -> list[Tensor]:
    return [torch.full((2, 2), float(number)) for number in range(6)]


def _fit(task: Line, **options: Any) -> Any:
    settings = {"strategy": "cpu", "max_epochs": 1, **options}
    return Trainer(**settings, checkpoint=False, loggers=(), progress_bar=False, log_every=2).fit(
        task, batches()
    )


def test_a_task_has_callbacks_of_its_own_and_leaves_values_out() -> None:
    task = Line()
    result = _fit(task)
    assert (task.stages, task.log_points, result.metrics) == (["train"], 3, {"own": 1.0})


def _by_hand(windows: list[list[int]]) -> Tensor:
    torch.manual_seed(0)
    net, data = Line().net, batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for window in windows:
        x = torch.cat([data[number] for number in window])
        F.mse_loss(net(x), x[:, :1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


@pytest.mark.parametrize(
    ("accumulation", "skipped", "windows", "count"),
    [(1, (1, 4), [[0], [2], [3], [5]], 2), (3, (1, 3, 4, 5), [[0, 2]], 1)],
)
def test_a_step_that_returns_none_weighs_nothing(
    accumulation: int, skipped: tuple[int, ...], windows: list[list[int]], count: int
) -> None:
    torch.manual_seed(0)
    task = Line(skipped)
    result = _fit(task, gradient_accumulation_steps=accumulation)
    assert torch.allclose(task.net.weight, _by_hand(windows), rtol=0, atol=1e-6)
    assert (result.progress.updates, result.progress.skipped) == (len(windows), count)


def _on_a_rank(skipped: tuple[int, ...]) -> tuple[list[Any], int, int]:
    torch.manual_seed(0)
    task = Line(skipped)
    result = _fit(task, strategy="ddp")
    return task.net.weight.tolist(), result.progress.updates, result.progress.skipped


def test_ranks_whose_steps_return_none_agree() -> None:
    first, second = run_distributed(_on_a_rank, (1, 4, 5))
    assert first == second
    weights, updates, skipped = first
    assert (updates, skipped) == (2, 1)
    assert torch.allclose(torch.tensor(weights), _by_hand([[0], [2, 3]]), rtol=0, atol=1e-6)


def _exchanges(strategy: str) -> list[int]:
    """The collectives of six updates of a task that may skip, and of one that may not."""
    counts, reduce = [], torch.distributed.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return reduce(*args, **options)

    torch.distributed.all_reduce = counted
    for may_skip in (True, False):
        counts.append(0)
        task = Line()
        task.may_skip = may_skip
        _fit(task, strategy=strategy, max_epochs=2)
    return counts


def test_a_task_that_may_skip_costs_one_exchange_in_an_update_and_none_where_it_is_sharded() -> None:
    for may_skip, other in run_distributed(_exchanges, "ddp", timeout=120):
        assert may_skip - other == 6
    for may_skip, other in run_distributed(_exchanges, "fsdp", timeout=120):
        assert may_skip == other


def test_a_task_that_may_not_skip_is_told() -> None:
    task = Line((1,))
    task.may_skip = False
    with pytest.raises(ConfigError, match="returned no loss"):
        _fit(task)


class _Engine:
    def __init__(self, task: Any) -> None:
        self.task = task

    def on_fit_start(self, run: Any) -> None:
        self.task.engine = run.engine


class Own(TaskModule):
    """Makes two updates for each batch."""

    makes_updates = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.engine: Any = None

    def run_callbacks(self, stage: str) -> list[Any]:
        return [_Engine(self)]

    def training_step(self, batch: Tensor) -> Any:
        for _ in range(2):
            self.net.zero_grad()
            F.mse_loss(self.net(batch), batch[:, :1]).backward()
            assert self.engine.update_inside("first")
        return {"loss": 0.0}
        yield

    def configure_optimizers(self) -> Any:
        return {"first": lambda parameters: torch.optim.SGD(parameters, lr=0.001)}


def test_a_step_may_make_its_updates_itself() -> None:
    torch.manual_seed(0)
    task = Own()
    result = Trainer(strategy="cpu", max_epochs=1, checkpoint=False, loggers=(), progress_bar=False).fit(
        task, batches()
    )
    assert result.progress.updates == 6
    assert torch.allclose(
        task.net.weight, _by_hand([[number] for number in range(6) for _ in range(2)]), rtol=0, atol=1e-6
    )
