"""Several optimizers of a task that train by one loss."""

from pathlib import Path
from typing import Any

import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, ConfigError, OptimizerConfig, TaskModule

Optimizers = dict[str, OptimizerConfig]


class Ranking(TaskModule):  # an embedding with sparse gradients if asked for, and a dense head
    def __init__(self, sparse: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1)
        self.options = options

    def forward(self, i: Tensor) -> Tensor:
        return self.head(self.table(i).tanh())[:, 0]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["y"])

    def configure_optimizers(self) -> Optimizers:
        table = OptimizerConfig("sparseadam" if self.table.sparse else "adam", lr=0.05)
        return {"table": table, "head": OptimizerConfig("sgd", lr=0.1, momentum=0.9, **self.options)}


class OwnStep(Ranking):  # the default, which the engine calls now
    def optimize(self, engine: Any, weighted_batches: Any) -> Any:
        return super().optimize(engine, weighted_batches)


def rows(batch_size: int = 8) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    samples = [
        {"i": torch.randint(10, (), generator=g), "y": torch.randn((), generator=g)} for _ in range(40)
    ]
    return DataLoader(samples, batch_size=batch_size)


def by_hand(clip: float, sparse: bool = False) -> Tensor:
    task = Ranking(sparse)
    table = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(task.table.parameters(), lr=0.05)
    head = torch.optim.SGD(task.head.parameters(), lr=0.1, momentum=0.9)
    for batch in rows():
        table.zero_grad()
        head.zero_grad()
        task.loss(task(batch["i"]), batch).backward()
        if not sparse:
            nn.utils.clip_grad_norm_(task.parameters(), clip)
        table.step()
        head.step()
    return nn.utils.parameters_to_vector(task.parameters()).detach()


def fit(task: TaskModule, batch_size: int = 8, resume: str | None = None, **options: Any) -> Tensor:
    quiet(**{"max_epochs": 1, "max_grad_norm": 0.1, **options}).fit(task, rows(batch_size), resume=resume)
    return nn.utils.parameters_to_vector(task.parameters()).detach()


def test_one_loss_trains_by_several_optimizers_together(tmp_path: Path) -> None:
    want = by_hand(0.1)
    assert (want - by_hand(1e9)).abs().max() > 0.01  # so the norm of all gradients matters
    halves: dict[str, Any] = {"batch_size": 4, "gradient_accumulation_steps": 2}
    for task, options in (
        (Ranking(), {}),
        (Ranking(), halves),
        (Ranking(), {"micro_batch": 3}),
        (OwnStep(), {}),
    ):
        torch.testing.assert_close(fit(task, **options), want, rtol=0, atol=1e-6)
    sparse = fit(Ranking(sparse=True), max_grad_norm=1e9)
    torch.testing.assert_close(sparse, by_hand(1e9, sparse=True), rtol=0, atol=1e-6)
    saved: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(best=0)}
    fit(Ranking(), max_steps=2, **saved)
    assert torch.equal(fit(Ranking(), resume="auto", **saved), fit(Ranking()))


def on_a_rank() -> list[Tensor]:
    return [fit(Ranking(), 4, strategy=each) for each in ("ddp", "fsdp")]


def test_one_loss_for_several_optimizers_is_the_same_on_ranks() -> None:
    for found in on_two_ranks(on_a_rank):
        for each in found:
            torch.testing.assert_close(each, by_hand(0.1), rtol=0, atol=1e-6)


def test_refusals_of_several_optimizers() -> None:
    twice = {"head": OptimizerConfig("sgd"), "all": OptimizerConfig("sgd", parameters="*")}
    both = type("Both", (Ranking,), {"configure_optimizers": lambda self: twice})

    def in_turns(self: Any, batch: Any) -> Any:
        yield "table", self.loss(self(batch["i"]), batch)

    functions = {name: lambda parameters: torch.optim.SGD(parameters, lr=0.1) for name in ("table", "head")}
    members = {"configure_optimizers": lambda self: functions, "training_step": in_turns}
    all_by_each = type("AllByEach", (Ranking,), members)
    closure = {"configure_optimizers": lambda self: torch.optim.LBFGS}
    evaluates = type("Evaluates", (Ranking,), closure)
    cases: dict[str, tuple[Any, ...]] = {
        "its own norm": (lambda: fit(Ranking(max_grad_norm=1.0)), "'head'", "give the limit to the Trainer"),
        "a parameter twice": (lambda: fit(both()), "'head.weight'", "one optimizer"),
        "functions": (lambda: fit(all_by_each()), "'table.weight'", "such as self.head.parameters()"),
        "a closure": (lambda: fit(evaluates()), "'lbfgs'", "closure"),
    }
    assert_refused(ConfigError, cases)
