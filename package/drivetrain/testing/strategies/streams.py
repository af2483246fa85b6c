"""The check of random streams: dropout on several ranks, compared with a loop in one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from drivetrain.core.random_streams import Streams
from drivetrain.data import Feed, Measure, Shard, Transfer, as_source
from drivetrain.distributed.ranks import Ranks
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.testing.strategies.job import Job, whole_state
from drivetrain.testing.strategies.tasks import Tokens


class WithDropout(Tokens):
    """`Tokens` with dropout and plain SGD."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.seeds: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, and note the seed of the random stream."""
        self.seeds.append(torch.initial_seed())
        return super().forward(tokens)

    def configure_optimizers(self) -> Any:
        """Return SGD, which the loop below builds too."""
        return lambda parameters: SGD(parameters, lr=0.1)


def each_rank_draws_for_itself(job: Job) -> None:
    """With dropout, a run equals one process that draws each rank's share from that rank's stream."""
    for accumulation in (1, 2):
        data = job.sequences(False, accumulation, empty=None)
        options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_epochs": 1}
        task = WithDropout()
        found = job.fit(False, task, data, **options)
        expected = _in_one_process(job, data, accumulation)
        job.assert_equals_one_process(
            found.weights, expected, f"the weights ({accumulation} micro-batches with dropout)"
        )
        seeds = Ranks(torch.distributed.get_rank(), job.world_size).all_gather(task.seeds)
        different = len(set(map(tuple, seeds)))
        assert different == job.shards, (
            f"{job.shards} shares of the data draw from {different} random streams"
        )


def _in_one_process(job: Job, data: Any, accumulation: int) -> Mapping[str, Tensor]:
    precision, strategy = as_precision(job.precision), job.make(job.world_size)
    task = WithDropout().to(strategy.device)
    precision.convert_module(task)
    context = precision.forward_context(strategy.device) or nullcontext
    optimizer = SGD(task.parameters(), lr=0.1)
    shards = [Shard(rank, strategy.data_size) for rank in range(strategy.data_size)]
    streams = [Streams(0, share.rank, strategy.device) for share in shards]
    measure, transfer = Measure(task.loss_weight, task.tokens), Transfer(strategy.device)
    feeds = [
        Feed(as_source(data, "training", 0, shard=each), transfer, measure, accumulation) for each in shards
    ]
    for step, windows in enumerate(zip(*(each.windows(0) for each in feeds), strict=True)):
        total = sum(float(each.weight) for window in windows for each in window.micro_batches)
        for stream, window in zip(streams, windows, strict=True):
            stream.seed_step(step)
            for each in map(transfer.moved, window.micro_batches):
                if each.weight:
                    with context():
                        loss = task.loss(task(each.batch["tokens"]), each.batch)
                    (loss * (float(each.weight) / total)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(task)
