"""Data parallelism by plain all-reduce: gradients are averaged after backward, buffers are rank 0's."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from drivetrain.distributed import (
    ALONE,
    Member,
    average_gradients,
    broadcast_buffers,
    broadcast_module,
    join,
    leave,
)
from drivetrain.strategies import Prepared, Strategy, Support, check_options, check_values, refuse_sparse


@dataclass(frozen=True, kw_only=True)
class AllReduceConfig:
    """Options of strategy "all_reduce".

    Attributes:
        timeout: Seconds that a collective may take; None for torch's limit.
    """

    timeout: float | None = None

    def __post_init__(self) -> None:
        """Check the options; raises ConfigError."""
        check_options(self, positive=("timeout",), flags=())


class AllReduce(Strategy):
    """One copy of the model per process, on a CPU or a GPU each.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.
    """

    name = "all_reduce"
    config_type = AllReduceConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"

    def __init__(
        self, config: AllReduceConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or AllReduceConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._member: Member | None = None
        self._last = True

    @classmethod
    def available(cls, hardware) -> Support:
        """Whether the strategy can run on this machine."""
        if not torch.distributed.is_available():
            return Support(False, "this build of torch has no torch.distributed")
        return Support(True)

    def supports(self, precision) -> Support:
        """Refuse precisions that scale the loss."""
        if precision.loss_scaling:
            return Support(False, "the loss is not scaled; use 'bf16-mixed' or '32'")
        return Support(True)

    def setup(self) -> None:
        """Join the process group."""
        limit = None if self.config.timeout is None else timedelta(seconds=self.config.timeout)
        self._member = member = join(self.world_size, self.device.type, limit)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def prepare(self, module, make_optimizers, precision) -> Prepared:
        """Convert and move the module, copy rank 0's weights, then make the optimizers."""
        check_values(module.task, self.name)
        refuse_sparse(module.task, self.name, "gradients are sent as one dense tensor")
        precision.convert_module(module)
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        broadcast_module(module, self.world_size)
        self._module = module
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def microbatch(self, model, last: bool) -> None:
        """Remember whether the next backward is the window's last."""
        self._last = last

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Add the gradient of `factor` times the loss; average after the window's last backward."""
        super().backward(loss, factor, inputs)
        if inputs is None and self._last:
            self.synchronize(self._parameters)

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over all processes."""
        average_gradients(parameters, self.world_size)

    def optimizer_step(self, optimizer) -> bool:
        """Make the step, then copy rank 0's buffers."""
        applied = super().optimizer_step(optimizer)
        broadcast_buffers(self._module, self.world_size)
        return applied

    def teardown(self) -> None:
        """Leave the process group."""
        self._module, self._parameters = None, []
        if self._member is not None:
            leave(self._member)
            self._member, self.ranks = None, ALONE
