"""Float16 on several processes: rounding is all that differs, as long as no gradient overflows."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import FEATURES, Regression, quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import FSDPConfig, LambdaCallback, OptimizerConfig, StrategyError, TaskModule
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

RATE = 0.05  # of Regression
ROUNDING = 2.0**-11  # of float16


def data(size: float) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    features = 0.25 * torch.randn(48, FEATURES, generator=generator)
    with torch.no_grad():
        missed = 0.1 * size * torch.randn(48, 1, generator=generator)
        return TensorDataset(features, Regression()(features) + missed)


def halved(kind: Any, batch_size: int, accumulation: int = 1, size: float = 3.0, **options: Any) -> Any:
    """The weights, and of each step whether it was made, the scale after it and the gradient's norm."""
    seen: list[tuple[bool, float]] = []
    norms: list[float] = []

    def note(run: Any) -> None:
        seen.append((run.result.applied, run.engine.strategy.state_dict()["scaler"]["scale"]))
        norms.append(0.0 if run.result.grad_norm is None else float(run.result.grad_norm))

    strategy = {} if kind is None else {"strategy": kind(world_size=2), "devices": 2}
    task = Regression()
    loader = DataLoader(data(size), batch_size=batch_size)
    options = {"precision": "16-mixed", "gradient_accumulation_steps": accumulation, **options}
    options = {"max_epochs": 1, **options}
    quiet(callbacks=[LambdaCallback(on_step_end=note)], **options, **strategy).fit(task, loader)
    return [*task.line.weight.flatten().tolist(), *task.line.bias.tolist()], seen, norms


def exact() -> tuple[Tensor, float]:  # six steps in float64
    # Products of float16 are added in float32. So a gradient 2 mean(r x) of residuals r = w x + b - y is off
    # by at most 3 roundings of |w| |x| + |b| (weights, features and products) and 3 of |r|. A plain step of
    # a small rate does not enlarge what is off already.
    task, off = Regression(), 0.0
    weights = torch.cat([task.line.weight.flatten(), task.line.bias]).detach().double()
    for features, target in DataLoader(data(3.0), batch_size=8):
        inputs = torch.cat([features, torch.ones(8, 1)], 1).double()
        residuals = inputs @ weights - target.flatten()
        of_outputs = inputs.abs() @ weights.abs()
        terms = 2 * (of_outputs + residuals.abs())[:, None] * inputs.abs()
        off += RATE * 3 * ROUNDING * float(terms.mean(0).norm())
        weights = weights - RATE * 2 * (residuals[:, None] * inputs).mean(0)
    return weights, off


def test_rounding_is_all_that_differs_however_a_batch_is_split() -> None:
    right, off = exact()
    partly = partial(FSDP, FSDPConfig(ignored=("line.bias",)))
    several = [(DDP, 4, 1), (DDP, 1, 4), (FSDP, 2, 2), (partly, 4, 1)]
    ranks = on_two_ranks(lambda: [halved(*each) for each in several])
    assert ranks[0] == ranks[1]
    for weights, scales, _ in [*ranks[0], *(halved(None, *each) for each in ((8, 1), (4, 2), (1, 8)))]:
        assert scales == [(True, 65536.0)] * 6
        assert float((torch.tensor(weights).double() - right).norm()) <= off


def test_clipping_sees_the_gradient_without_the_loss_scale() -> None:
    task = Regression()
    start = torch.tensor([*task.line.weight.flatten().tolist(), *task.line.bias.tolist()])
    features, target = data(3.0)[:8]
    task.loss(task(features), (features, target)).backward()
    norm = float(torch.cat([each.grad.flatten() for each in task.parameters()]).norm())  # type: ignore[union-attr]

    def clipped(kind: Any, batch_size: int) -> Any:
        return halved(kind, batch_size, max_grad_norm=norm / 2, max_epochs=None, max_steps=1)

    runs = on_two_ranks(lambda: [clipped(kind, 4) for kind in (DDP, FSDP)])[0]
    for weights, _, norms in [clipped(None, 8), *runs]:
        assert norms == pytest.approx([norm], rel=0.01)
        assert float((torch.tensor(weights) - start).norm()) == pytest.approx(RATE * norm / 2, rel=0.01)


def test_overflow_in_the_shard_of_one_rank_skips_the_step_of_all() -> None:
    # Of a weight of one row rank 1 has nothing.
    first, second = on_two_ranks(lambda: halved(FSDP, 4, size=1000.0))
    assert first == second
    assert first[1][0] == (False, 32768.0)


class OneOverflows(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(2, 1), nn.Linear(2, 1)

    def training_step(self, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "good", self.good(batch).square().mean()
        yield "bad", (self.bad(batch).sum() * 0).sqrt()  # of 0, where its gradient is infinite

    def configure_optimizers(self) -> Any:
        return {name: OptimizerConfig("sgd", lr=0.01) for name in ("good", "bad")}


def test_optimizer_that_always_overflows_ends_the_run_before_others_stop_learning() -> None:
    moved: list[Tensor] = []
    note = LambdaCallback(on_step_end=lambda run: moved.append(run.task.good.weight.detach().clone()))
    batches = list(torch.randn(60, 4, 2, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(StrategyError, match="optimizer 'bad': gradients overflow even at the smallest"):
        quiet(max_epochs=1, precision="16-mixed", callbacks=[note]).fit(OneOverflows(), batches)
    assert len(moved) > 20
    assert all(not torch.equal(one, after) for one, after in pairwise(moved[-15:]))
