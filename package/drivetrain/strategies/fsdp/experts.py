"""Expert parallelism: each process keeps some of a layer's experts, and tokens go to the process of theirs.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020.
torch 2.13 has no parallel style for it. That of torchtitan also exchanges sorted tokens and their counts, but
leaves it to the module to take its part of each weight, and to the program to scale the gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.utils._python_dispatch import _disable_current_modes

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.processes import has_fake_ranks


class ExpertParallel(ParallelStyle):
    """The style of a module of experts in a `parallel_plan`, for `FSDPConfig(expert_parallel=True)`.

    All parameters of the module are its own, not those of a submodule, and each has the shape (experts, ...).
    Its `forward(tokens, counts)` gets the tokens of all experts, of shape (rows, features), those of the
    first expert first, and the number of rows of each expert, int64 of shape (experts,). It returns a tensor
    with a row for each token. Under this style it gets the tokens of all processes for the experts of this
    one, and its parameters have the values of these experts. No token is dropped.

    Raises:
        StrategyError: The module is of another kind, or the processes do not divide its experts.
    """

    dimension = "shard"  # of the mesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        shapes = {name: list(each.shape) for name, each in module.named_parameters()}
        experts = {shape[0] if shape else 0 for shape in shapes.values()}
        buffers = [name for name, _ in module.named_buffers()]
        if len(experts) != 1 or any("." in name for name in shapes) or buffers:
            raise NotImplementedError(
                "ExpertParallel is for a module with parameters of its own, each of the shape (experts, ...),"
                f" none in submodules, and no buffers; this one has {shapes or 'none'}"
                f"{f' and the buffers {buffers}' if buffers else ''}"
            )
        (number,) = experts
        if number % size:
            raise NotImplementedError(
                f"{size} processes that shard the model do not divide {number} experts; choose a multiple of"
                " them, or FSDPConfig(sharding='hybrid', shard_size=...) with a divisor"
            )
        for name, each in list(module.named_parameters()):
            part = distribute_tensor(each, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, each.requires_grad))
        exchange = _TokenExchange(device_mesh, number, type(module).__name__)
        module.register_forward_pre_hook(exchange.send)
        module.register_forward_hook(exchange.give_back, always_call=True)
        return module


class _TokenExchange:
    """The exchange of a module's tokens, before and after its forward."""

    def __init__(self, mesh: DeviceMesh, experts: int, name: str) -> None:
        self._group, self._size, self._experts = mesh.get_group(), mesh.size(), experts
        self._name = name  # of the class, which FSDP replaces

    def send(self, module: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the tokens of all processes for this one's experts, by expert, and their counts.

        While the module's forward runs, its attributes are this process's parts of the parameters.
        """
        if len(inputs) != 2 or inputs[1].shape != (self._experts,):
            raise StrategyError(
                f"{self._name}.forward, whose experts are divided among processes, gets (tokens, counts)"
                f" without names: the tokens by expert, and {self._experts} counts of them"
            )
        tokens, counts = inputs
        received = torch.empty_like(counts)
        distributed.all_to_all_single(received, counts, group=self._group)
        in_plan = has_fake_ranks()
        with _disable_current_modes() if in_plan else nullcontext():
            if in_plan:
                counts = even_counts(len(tokens), self._experts)
                received = counts[: self._experts // self._size].repeat(self._size)
            by_process = torch.stack([counts, received]).view(2, self._size, -1)
            # Waits for the device, as the exchange must.
            self._sent, self._received = by_process.sum(2).tolist()
            if sum(self._sent) != len(tokens):
                total = sum(self._sent)
                raise StrategyError(f"{self._name}: the counts add up to {total}, for {len(tokens)} tokens")
            here = by_process[1]
            numbers = torch.arange(here.shape[1], device=here.device).repeat(self._size)
            self._order = numbers.repeat_interleave(received).argsort(stable=True)
            by_expert = here.sum(0)
        for key, each in module.named_parameters():
            vars(module)[key] = self._part(each)
        return self._exchanged(tokens, self._sent, self._received)[self._order], by_expert

    def give_back(self, module: nn.Module, inputs: Any, output: Tensor | None) -> Tensor | None:
        """Return the rows of this process's tokens; forget the parts also if there was an error."""
        parts = [vars(module).pop(key, None) for key, _ in module.named_parameters()]
        if output is None:
            return None
        if len(output) != len(self._order):
            rows = len(self._order)
            raise StrategyError(f"{self._name}.forward returned {len(output)} rows for {rows} tokens")
        if not len(output):  # the others wait for its backward, even if the forward has used nothing
            output = output + sum(each.sum() for each in (inputs[0], *parts))
        return self._exchanged(output[self._order.argsort()], self._received, self._sent)

    def _part(self, parameter: Any) -> Tensor:
        part: Tensor = parameter.to_local()
        if part.requires_grad:  # it gets the sum over all processes, whose mean is wanted
            part.register_hook(lambda gradient: gradient / self._size)  # type: ignore[no-untyped-call]
        return part

    def _exchanged(self, tokens: Tensor, sent: list[int], received: list[int]) -> Tensor:
        made: Tensor = _AllToAll.apply(tokens, sent, received, self._group)  # type: ignore[no-untyped-call]
        return made


def even_counts(rows: int, experts: int) -> Tensor:
    """Return counts for a plan, whose tensors have no values: as many rows for each expert."""
    with _disable_current_modes():
        return torch.tensor([(rows + experts - 1 - each) // experts for each in range(experts)])


class _AllToAll(torch.autograd.Function):
    """Sends rows to each process, and receives others from it; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.given, ctx.crosses_ranks = (sent, received, group), True
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, received, group = ctx.given
        return _all_to_all(gradients[0], received, sent, group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    made = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(made, rows.contiguous(), received, sent, group=group)
    return made
