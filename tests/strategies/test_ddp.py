"""Several copies of a model that learn as one: the options, and what is said when something does not fit."""

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.strategies.conforming import conforms, refused
from tests.strategies.decisions import DECISIONS
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Freeze, FSDPConfig, OptimizerConfig, StrategyError, TaskModule
from drivetrain.strategies import SingleDevice
from drivetrain.strategies.ddp import DDP, DDPConfig
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.task.task import StepModule
from drivetrain.testing import check_strategy

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def ddp(world_size: int, **options: Any) -> DDP:
    return DDP(DDPConfig(**options), world_size=world_size)


def fit(task: TaskModule, data: Any, **options: Any) -> list[Any]:
    quiet(max_epochs=1, strategy=ddp(2, **options), devices=2).fit(task, data)
    return [each.tolist() for each in task.parameters()]


def test_ddp_steps_equal_those_of_one_process() -> None:
    conforms(ddp, "steps", "generator_steps", "all_begin_with_the_weights_of_rank_0")


@pytest.mark.landing
def test_ddp_conforms() -> None:
    check_strategy(ddp, 2)
    conforms(ddp, *DECISIONS)


OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"static_graph": True, "gradient_as_bucket_view": False, "bucket_mb": 0.0001},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_ddp_options_conform(options: dict[str, Any]) -> None:
    conforms(lambda size: ddp(size, **options), "steps", "parameters_may_be_unfrozen")


def test_static_graph_is_learned_again_with_parameters_that_are_unfrozen() -> None:
    def trained(strategy: Any, devices: int) -> dict[str, Tensor]:
        task = Regression()
        options = {"gradient_accumulation_steps": 2, "callbacks": [Freeze("*bias", until="2 steps")]}
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=2, **options)
        trainer.fit(task, pairs(16, 4 // devices))
        return task.state_dict()

    def compare() -> None:
        torch.testing.assert_close(trained(ddp(2, static_graph=True), 2), trained(SingleDevice("cpu"), 1))

    on_two_ranks(compare)


class Partly(TaskModule):  # uses one of its two layers; which one, a batch decides if it is asked to
    def __init__(self, alternate: bool = False) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)
        self.alternate = alternate

    def training_step(self, batch: Tensor) -> Tensor:
        layer = self.idle if self.alternate and bool(batch[0, 0] > 2) else self.used
        loss: Tensor = layer(batch).square().mean()
        return loss


HALVES = [torch.full((4, 2), float(number)) for number in range(1, 5)]


def test_parameters_without_a_gradient_are_listed_by_name() -> None:
    text = refused(lambda: fit(Partly(), HALVES))
    assert "the step used 2 of 4 trainable parameters" in text
    assert "no gradient: idle.weight, idle.bias. Freeze them" in text
    assert "DDPConfig(find_unused_parameters=True)" in text
    assert "of 4 trainable parameters" in refused(lambda: fit(Partly(True), HALVES))  # late, not at the start
    # The last window's last micro-batch leaves out what its first one used: an average would lack a part.
    options: dict[str, Any] = {"max_epochs": 1, "devices": 2, "gradient_accumulation_steps": 2}
    early = refused(lambda: quiet(strategy=ddp(2), **options).fit(Partly(True), HALVES))
    assert "the last micro-batch of the window used 2 of 4 trainable parameters" in early


class Swapped(TaskModule):  # rank 1 yields its two optimizers, of equal sizes, in the other order
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 1), nn.Linear(2, 1)

    def training_step(self, batch: Tensor) -> Iterator[Any]:
        for name in ("right", "left") if torch.distributed.get_rank() else ("left", "right"):
            yield name, getattr(self, name)(batch).square().mean()

    def configure_optimizers(self) -> Mapping[str, OptimizerConfig]:
        return {name: OptimizerConfig("sgd", lr=0.1) for name in ("left", "right")}


def test_ranks_that_yield_optimizers_in_another_order_are_told() -> None:
    text = refused(lambda: quiet(strategy=ddp(2), devices=2, max_steps=1).fit(Swapped(), HALVES))
    assert "rank 0 steps optimizer 'left'; rank 1 steps optimizer 'right'" in text


def test_find_unused_parameters_lets_steps_leave_parameters_out() -> None:
    def found() -> list[Any]:
        return [fit(Partly(each), HALVES, find_unused_parameters=True) for each in (False, True)]

    first, second = on_two_ranks(found)
    assert first == second


class Running(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(self.norm.running_mean.tolist())  # type: ignore[union-attr]
        loss: Tensor = (self.norm(batch) - 1).square().mean()
        return loss


def means(strategy: Any) -> Any:
    data = [torch.randn(4, 2, generator=torch.Generator().manual_seed(each)) for each in range(6)]
    task = Running()
    quiet(max_epochs=1, strategy=strategy, devices=2).fit(task, data)
    return task.seen


def test_buffers_are_those_of_rank_0_before_each_forward() -> None:
    strategies = (DDPConfig(), FSDPConfig(), DDPConfig(broadcast_buffers=False))
    (*first, unshared), (*second, others) = on_two_ranks(lambda: [means(each) for each in strategies])
    assert first == second
    assert unshared[1] != others[1]


def test_ranks_have_the_same_weights_from_start_to_end() -> None:
    def start() -> tuple[list[Any], list[Any]]:
        task, other = Regression(), Regression()
        with torch.no_grad():
            for each in (task, other):
                each.line.weight.add_(int(os.environ["RANK"]))
        quiet(strategy=ddp(2), devices=2).validate(other, pairs())
        return fit(task, pairs()), other.line.weight.tolist()

    first, second = on_two_ranks(start)
    assert first == second


def test_number_of_processes_must_be_that_of_the_group() -> None:
    def wrong() -> None:
        with pytest.raises(StrategyError, match="process group has 2 processes, and this run asks for 3"):
            quiet(max_epochs=1, strategy=DDP(world_size=3), devices=3).fit(Regression(), pairs())

    on_two_ranks(wrong)


class Complex(Regression):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.turn = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward((features.to(torch.complex64) @ self.turn).real)


def test_complex_parameters_train_on_two_ranks_as_in_one_process() -> None:
    def trained_by(strategy: Any, devices: int) -> list[Tensor]:
        task = Complex()
        quiet(max_epochs=1, strategy=strategy, devices=devices).fit(task, pairs(8, batch_size=4 // devices))
        return [torch.view_as_real(task.turn.detach()), task.line.weight.detach()]

    def compare() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(trained_by("ddp", 2), trained_by(SingleDevice("cpu"), 1))

    on_two_ranks(compare)


# Sparse gradients.


class Words(TaskModule):
    def __init__(self, sparse: bool = True, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
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

    def configure_optimizers(self) -> Any:
        return OptimizerConfig(self.optimizer, lr=0.1)


def words(batch_size: int) -> DataLoader[Any]:
    numbers = torch.randint(0, 30, (32, 3), generator=torch.Generator().manual_seed(1))
    targets = numbers.float().mean(1, keepdim=True) / 30
    return DataLoader(TensorDataset(numbers, targets), batch_size=batch_size)


def trained(task: TaskModule, strategy: Any, devices: int, **options: Any) -> dict[str, Tensor]:
    quiet(strategy=strategy, devices=devices, max_epochs=2, **options).fit(task, words(8 // devices))
    return task.state_dict()


SPLITS: list[dict[str, Any]] = [{}, {"micro_batch": 2, "max_grad_norm": 0.1}]
SPLITS += [{"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}]


def test_sparse_gradients_train_as_dense_ones_in_one_process() -> None:
    for options in SPLITS:
        sparse, dense = (trained(Words(each), SingleDevice("cpu"), 1, **options) for each in (True, False))
        torch.testing.assert_close(sparse, dense)


def test_sparse_gradients_train_on_two_ranks_as_in_one_process() -> None:
    def compare() -> None:
        for options in SPLITS:
            alone = trained(Words(), SingleDevice("cpu"), 1, **options)
            torch.testing.assert_close(trained(Words(), "ddp", 2, **options), alone)
            if "micro_batch" not in options:
                static = DDPConfig(static_graph=True)
                torch.testing.assert_close(trained(Words(), static, 2, **options), alone)

    on_two_ranks(compare)


def test_sparse_gradients_are_refused_by_the_embeddings_name() -> None:
    with pytest.raises(StrategyError, match=r"'word\.weight' of Words gets sparse gradients"):
        FSDP(world_size=2).prepare(StepModule(Words()), lambda _: {}, PRECISIONS["32"])
