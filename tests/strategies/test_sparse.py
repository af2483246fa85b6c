"""Embeddings with sparse gradients: trained as dense ones are, by one process and by several, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DDPConfig, Engine, OptimizerConfig, TaskModule
from drivetrain.strategies import SingleDevice
from drivetrain.testing.distributed import run_distributed

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
)


class Words(TaskModule):
    """Two embeddings and a layer, by SGD."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.word = nn.Embedding(30, 4, sparse=sparse)
            self.bag = nn.EmbeddingBag(30, 4, sparse=sparse, mode="sum")
            self.head = nn.Linear(4, 1)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.word(words).mean(1) + self.bag(words))
        return scores

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


class Alternating(Words):
    """The same, by a generator step that trains its parts one after the other."""

    def training_step(self, batch: Any) -> Any:
        for name in ("word", "bag", "head"):
            yield name, self.loss(self(batch[0]), batch)

    def configure_optimizers(self) -> Any:
        optimizers = {"word": "sparseadam", "bag": "sgd", "head": "adamw"}
        return {name: OptimizerConfig(each, lr=0.05) for name, each in optimizers.items()}


def data(batch_size: int) -> DataLoader[Any]:
    words = torch.randint(0, 30, (32, 3), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(words, words.float().mean(1, keepdim=True) / 30), batch_size=batch_size)


def trained(task: TaskModule, strategy: Any, devices: int, **options: Any) -> dict[str, Tensor]:
    quiet(strategy=strategy, devices=devices, max_epochs=2, **options).fit(task, data(8 // devices))
    return task.state_dict()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    {"micro_batch": 2, "max_grad_norm": 0.1},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process_trains_them_as_dense_ones(options: dict[str, Any]) -> None:
    sparse, dense = (trained(Words(each), SingleDevice("cpu"), 1, **options) for each in (True, False))
    torch.testing.assert_close(sparse, dense)


def _as_one_process() -> None:
    strategies = ("ddp", DDPConfig(static_graph=True))
    for options in OPTIONS:
        alone = trained(Words(), SingleDevice("cpu"), 1, **options)
        for strategy in strategies if "micro_batch" not in options else ("ddp",):
            torch.testing.assert_close(trained(Words(), strategy, 2, **options), alone)
    alone = trained(Alternating(), SingleDevice("cpu"), 1)
    torch.testing.assert_close(trained(Alternating(), "ddp", 2), alone)
    torch.testing.assert_close(own_loop("ddp", 2), own_loop(SingleDevice("cpu"), 1))


def own_loop(strategy: Any, devices: int) -> dict[str, Tensor]:
    task = Words()
    with Engine(strategy, devices=devices) as engine:
        model, optimizer = engine.prepare(task, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for number, batch in enumerate(engine.prepare_data(data(8 // devices))):
            engine.backward(task.loss(model(batch[0]), batch), weight=1.0 + number % 2)
            if number % 2:
                engine.step(optimizer, max_grad_norm=0.1)
    return task.state_dict()


@needs_gloo
def test_several_processes_train_them_as_one_does() -> None:
    run_distributed(_as_one_process, world_size=2)


@needs_gloo
@pytest.mark.parametrize("strategy", ["fsdp", "accelerate", DDPConfig(communication="fp16")])
def test_where_they_cannot_be_had_the_embedding_is_named(strategy: Any) -> None:
    with pytest.raises(RuntimeError, match=r"'word\.weight' of Words gets sparse gradients"):
        run_distributed(trained, Words(), strategy, 2, world_size=2)
