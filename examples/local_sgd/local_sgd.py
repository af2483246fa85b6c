"""Local SGD: each process makes its own steps, and every few steps the processes average their weights.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Optimizer states are averaged too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from drivetrain.distributed import ALONE, Member, broadcast_module, join, leave
from drivetrain.strategies import Prepared, Strategy, Support, check_options, check_values, refuse_sparse


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig:
    """Options of strategy "local_sgd".

    Attributes:
        period: Steps between two averages.
    """

    period: int = 8

    def __post_init__(self) -> None:
        """Check the options; raises ConfigError."""
        check_options(self, positive=("period",), flags=())


class LocalSGD(Strategy):
    """One copy of the model per process, with steps of its own between two averages.

    Args:
        config: The options.
        device: The kind of device, "cpu" or "cuda".
        world_size: How many processes.
    """

    name = "local_sgd"
    config_type = LocalSGDConfig
    needs = "several processes, on CPUs (gloo) or CUDA GPUs (NCCL)"
    refusals: Mapping[str, str] = {
        "exactness": "each process updates its own copy of the weights between two averages"
    }

    def __init__(
        self, config: LocalSGDConfig | None = None, *, device: str = "cpu", world_size: int = 1
    ) -> None:
        self.config = config or LocalSGDConfig()
        self.device = torch.device(device)
        self.world_size = world_size
        self._member: Member | None = None
        self._steps = 0

    @classmethod
    def available(cls, hardware) -> Support:
        """Whether the strategy can run on this machine."""
        if not distributed.is_available():
            return Support(False, "this build of torch has no torch.distributed")
        return Support(True)

    def supports(self, precision) -> Support:
        """Refuse precisions that scale the loss."""
        if precision.loss_scaling:
            return Support(False, "the loss is not scaled; use 'bf16-mixed' or '32'")
        return Support(True)

    def setup(self) -> None:
        """Join the process group."""
        self._member = member = join(self.world_size, self.device.type)
        self.rank, self.device, self.ranks = member.rank, member.device, member.ranks

    def prepare(self, module, make_optimizers, precision) -> Prepared:
        """Convert and move the module, copy rank 0's weights, then make the optimizers."""
        check_values(module.task, self.name)
        refuse_sparse(module.task, self.name, "weights are averaged as dense tensors")
        precision.convert_module(module)
        module.to(self.device)
        module.context = precision.forward_context(self.device)
        broadcast_module(module, self.world_size)
        self._module, self._steps = module, 0
        self._optimizers = make_optimizers(module) if make_optimizers else {}
        return Prepared(module, self._optimizers)

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Add the gradient of this process's micro-batch; nothing is exchanged."""
        root = None if factor is None else torch.as_tensor(factor, dtype=loss.dtype, device=loss.device)
        loss.backward(root, inputs=inputs)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by this process's norm, and return the mean over the processes for the log."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return self._mean(norm)

    def optimizer_step(self, optimizer) -> bool:
        """Make the local step; average after the last step of a period."""
        applied = super().optimizer_step(optimizer)
        self._steps += 1
        if self._steps % self._period == 0:
            self._average()
        return applied

    @contextmanager
    def checkpoint_layout(
        self, optimizers: Mapping[str, Any], write: bool = False
    ) -> Iterator[Mapping[str, Any]]:
        """Run the block with the averages in place, and put this process's values back unless `write`."""
        weights, slots = self._weights(), self._slots()
        mine = [each.data for each in weights], [state[name] for state, name in slots]
        for each in weights:  # new tensors: a checkpoint may be written after the block
            each.data = self._mean(each.data.clone())
        for state, name in slots:
            state[name] = self._mean(state[name].clone())
        yield optimizers
        if not write:
            for each, value in zip(weights, mine[0], strict=True):
                each.data = value
            for (state, name), value in zip(slots, mine[1], strict=True):
                state[name] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the steps and, in the middle of a period, each process's values."""
        state: dict[str, Any] = {"steps": self._steps}
        if self.world_size > 1 and self._steps % self._period:
            state["replicas"] = self.ranks.all_gather([each.detach().cpu().clone() for each in self._local()])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this process's values; with another number of processes all begin with the averages."""
        self._steps = state.get("steps", 0)
        replicas = state.get("replicas", ())
        if len(replicas) == self.world_size:
            for each, value in zip(self._local(), replicas[self.rank], strict=True):
                each.detach().copy_(value)

    def restore(self) -> None:
        """Leave the averages in the task when the run ends."""
        self._average()

    def teardown(self) -> None:
        """Leave the process group."""
        self._module, self._optimizers = None, {}
        if self._member is not None:
            leave(self._member)
            self._member, self.ranks = None, ALONE

    @property
    def _period(self) -> int:
        return self.config.period * len(self._optimizers)  # a step calls each optimizer once

    def _weights(self) -> list[Tensor]:
        """Return the trained parameters and the buffers, which differ between the processes."""
        trained = [each for each in self._module.parameters() if each.requires_grad]
        return [*trained, *(each for each in self._module.buffers() if each.is_floating_point())]

    def _slots(self) -> list[tuple[dict[str, Any], str]]:
        """Return the optimizers' tensors by state and name, in the same order in every process."""
        states = [
            optimizer.state.get(parameter, {})
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        return [
            (each, name) for each in states for name, value in sorted(each.items()) if torch.is_tensor(value)
        ]

    def _local(self) -> list[Tensor]:
        return [*self._weights(), *(state[name] for state, name in self._slots())]

    def _average(self) -> None:
        for each in self._local():
            each.detach().copy_(self._mean(each.detach().clone()))

    def _mean(self, tensor: Tensor) -> Tensor:
        if self.world_size > 1:
            distributed.all_reduce(tensor)
            tensor /= self.world_size
        return tensor
