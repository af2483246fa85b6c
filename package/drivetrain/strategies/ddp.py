"""Distributed data parallel: a copy of the model in every process, gradients averaged while backward runs.

Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.core.errors import StrategyError
from drivetrain.core.validation import by_name
from drivetrain.distributed.group import uncompared
from drivetrain.distributed.processes import has_fake_ranks
from drivetrain.strategies.base import MakeOptimizers, Prepared, Support, has_bfloat16, has_collectives
from drivetrain.strategies.checks import check_options, check_values
from drivetrain.strategies.loss_scale import LossScale
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.replicated import Replicated
from drivetrain.strategies.sparse import refuse_sparse
from drivetrain.task.task import StepModule

_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
"""torch's name for the option; where the first name exists, the second is deprecated."""

_FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
    "sync_batchnorm",
)


@by_name
@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """Options of strategy "ddp"; see `torch.nn.parallel.DistributedDataParallel`.

    Attributes:
        find_unused_parameters: Allow steps that leave parameters out, at the cost of a walk of the graph.
        static_graph: Whether every step uses the same parameters in the same order.
        bucket_mb: Megabytes of gradients that are sent together.
        gradient_as_bucket_view: Store gradients in the buckets, which saves a copy.
        broadcast_buffers: Copy rank 0's buffers, such as running means, to all ranks before each forward.
        sync_batchnorm: Compute batch statistics over all ranks; GPUs only.
        timeout: Seconds that a collective may take; None uses torch's limit.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_mb: float = 25.0
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    sync_batchnorm: bool = False
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_options(self, ("bucket_mb", "timeout"), _FLAGS)


class DDP(Replicated):
    """One copy of the model per process, each on a CPU or a GPU.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: The number of processes.

    Raises:
        StrategyError: An option is not supported on this kind of device.
    """

    name = "ddp"
    config_type = DDPConfig
    leaves_out = "DDPConfig(find_unused_parameters=True)"
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals = dict.fromkeys(("recomputation", "skipping", "value_clipping", "unfreezing"), "")

    def __init__(self, config: DDPConfig | None = None, *, device: str = "cpu", world_size: int = 1) -> None:
        self.config = config or DDPConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._begin()
        self.refusals = {"micro_batch": _why_whole(self.config)}
        if device == "cpu" and self.config.sync_batchnorm:
            raise StrategyError("sync_batchnorm needs GPUs: torch has no synchronised batch norm for CPUs")

    @classmethod
    def available(cls, hardware: Any) -> Support:
        """Return whether a machine can run it; each can, with processes on the CPU."""
        return has_collectives()

    def supports(self, precision: Precision) -> Support:
        """Support all built-in precisions; bfloat16 needs a GPU with bfloat16."""
        return has_bfloat16(self.device, precision)

    def setup(self) -> None:
        """Join the process group."""
        # DDP's constructor imports it, which takes a second: do it now, while other processes still start.
        import torch._dynamo  # noqa: F401

        self._join(self.config.timeout)
        self._begin()

    def teardown(self) -> None:
        """Leave the process group."""
        self._begin()
        self._leave()

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert, move, wrap, then make the optimizers."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        if self.config.sync_batchnorm:
            module.task = nn.SyncBatchNorm.convert_sync_batchnorm(module.task)  # type: ignore[no-untyped-call]
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        self._scale = LossScale(self.device) if precision.loss_scaling else None
        if make_optimizers is not None and self.device.type == "cuda" and self.world_size > 1:
            refuse_sparse(module.task, self.name, "NCCL cannot reduce them")
        return self._replicate(module, make_optimizers)

    def _wrapper(self, module: StepModule, init_sync: bool) -> DistributedDataParallel:
        config = self.config
        buffers: dict[str, Any] = {_BUFFERS: config.broadcast_buffers}
        return DistributedDataParallel(
            module,
            init_sync=init_sync and not has_fake_ranks(),
            device_ids=[self.device] if self.device.type == "cuda" else None,
            process_group=uncompared(),
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **buffers,
        )


def _why_whole(config: DDPConfig) -> str:
    """Return why a step cannot bypass DDP's wrapper, as the parts of a batch do; empty if it can."""
    if config.sync_batchnorm:
        return "with sync_batchnorm a forward waits for the other ranks' forwards, and one may fail"
    if not config.broadcast_buffers:
        return "with broadcast_buffers=False each rank has different buffers"
    return ""
