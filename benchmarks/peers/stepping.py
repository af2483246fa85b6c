"""Loops of Fabric and Accelerate under DDP that give way after each step, for `distributed.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def fabric_loop(task: Any, batches: list[Any], strategy: str) -> Iterator[None]:
    """Fabric's, in the process group that is there."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    fabric = Fabric(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(gradient_as_bucket_view=True),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    net, optimizer = fabric.setup(task.net, task.work.make_optimizer(task.net.parameters()))
    net.train()
    for batch in batches[rank::world_size]:
        fabric.backward(task.loss(net(batch["x"]), batch))
        optimizer.step()
        optimizer.zero_grad()
        yield


def accelerate_loop(task: Any, batches: list[Any], strategy: str) -> Iterator[None]:
    """Accelerate's, in the process group that is there."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    optimizer = task.work.make_optimizer(task.net.parameters())
    net, optimizer = accelerator.prepare(task.net, optimizer)
    net.train()
    for batch in batches[rank::world_size]:
        accelerator.backward(task.loss(net(batch["x"]), batch))
        optimizer.step()
        optimizer.zero_grad()
        yield
