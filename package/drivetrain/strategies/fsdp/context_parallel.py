"""Context parallelism: each of several neighbouring processes runs a part of a sample's sequence.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023 (https://arxiv.org/abs/2309.14509). An all-to-all before attention gives each
process the whole sequence and a part of the heads; one after it does the reverse.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from drivetrain.core.errors import ConfigError, DataError, StrategyError
from drivetrain.core.types import StepOutput
from drivetrain.strategies.fsdp.tensor_parallel import modules_named
from drivetrain.strategies.zero_gradients import zero_nodes
from drivetrain.task.assigned_loss import is_sum
from drivetrain.task.model_info import info_of
from drivetrain.task.output import read_output, wide_dtype
from drivetrain.task.task import StepModule, TaskModule, assigned_loss, measure_of

Group = distributed.ProcessGroup

SCALARS_ONLY = "with context_parallel each process has the outputs for a part of a sequence"
"""Why outputs are not available."""


def context_group(world_size: int, parts: int, split: int) -> Group:
    """Return this process's group of those that share a sample's sequence. All processes must call it.

    Args:
        parts: The number of processes of a group.
        split: The number of neighbours that split modules. Of those, each is in another group.
    """
    starts = [first + each for first in range(0, world_size, parts * split) for each in range(split)]
    groups = [[start + part * split for part in range(parts)] for start in starts]
    mine: Group = distributed.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return mine


class ContextParallel:
    """Splits the batches of a step module, joins what its steps return, and exchanges heads for positions.

    It works by hooks, which `remove` removes.

    Args:
        module: The step module.
        group: The processes that share a sample's sequence.

    Raises:
        ConfigError: The task does not say what to split, or its loss is a sum.
    """

    def __init__(self, module: StepModule, group: Group) -> None:
        task, info = module.task, info_of(module.task)
        self._kind = type(task).__name__
        if not isinstance(task, TaskModule) or inspect.isgeneratorfunction(task.training_step):
            raise StrategyError(
                "context_parallel joins the parts of one loss: it needs a TaskModule whose training_step"
                f" returns a loss, which {self._kind} does not have"
            )
        given = info.sequence_columns, info.attention_modules
        if not all(given) or str in map(type, given):
            raise ConfigError(
                f"context_parallel needs to know what to split: define {self._kind}.model_info(), which"
                " returns ModelInfo(sequence_columns=('tokens', ...),"
                " attention_modules=('blocks.*.attention',)); or leave context_parallel at 1"
            )
        if is_sum(assigned_loss(task)):
            raise ConfigError(f"{self._kind}.loss is a sum; context parallel needs a mean: reduction='mean'")
        self._columns, self._lengths, self._group = info.sequence_columns, set[int](), group
        self._size, self._rank = group.size(), group.rank()
        self._weight = measure_of(task).weight
        self._weight_of_whole: float | None = math.nan if self._weight is None else None
        self._exchanges: list[Node | None] | None = None  # of a forward
        self._zeros: list[Any] = []  # the hooks of the last backward
        modules = dict(task.named_modules())
        self._handles: list[Any] = [
            module.register_forward_pre_hook(lambda _, given: self._split(given)),
            module.register_forward_hook(lambda _, given, output: self._join(given[0], output)),
        ]
        named = [modules_named(task, each, "ModelInfo(attention_modules=...)") for each in given[1]]
        for name in dict.fromkeys(name for names in named for name in names):
            self._add(name, modules[name])

    def remove(self) -> None:
        for each in (*self._handles, *self._zeros):
            each.remove()
        self._zeros = []

    def _add(self, name: str, module: Any) -> None:
        def before(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
            three = (*given, None, None, None)[:3]  # None for one that is given by keyword
            return (*(self._of_heads(name, each) for each in three), *given[3:])

        def after(_: Any, given: tuple[Any, ...], output: Any) -> Tensor:
            query = given[0]
            if not isinstance(output, Tensor) or output.shape[:3] != query.shape[:3]:
                shown = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise StrategyError(
                    f"with context_parallel {name!r} must return a tensor [batch, heads, positions, size] as"
                    f" its query is, {list(query.shape)}, not {shown}"
                )
            exchanged: Tensor = _Exchange.apply(output, 2, 1, self._group)  # type: ignore[no-untyped-call]
            if self._exchanges is not None:  # and this is no forward that backward repeats
                self._exchanges.append(exchanged.grad_fn)
            return exchanged

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _of_heads(self, name: str, given: Any) -> Tensor:
        if not isinstance(given, Tensor) or given.ndim != 4 or given.shape[1] % self._size:
            shown = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise StrategyError(
                f"context_parallel={self._size} divides the heads of {name!r}: its first three arguments"
                " must be query, key and value, [batch, heads, positions, size], each with a multiple of"
                f" {self._size} heads, not {shown}"
            )
        if given.shape[2] not in self._lengths:
            raise StrategyError(
                f"with context_parallel query, key and value of {name!r} must have the positions of a column"
                f" that is divided, and no further ones; here they have {given.shape[2]}, and the columns of"
                f" this process {', '.join(map(str, self._lengths))}"
            )
        exchanged: Tensor = _Exchange.apply(given, 1, 2, self._group)  # type: ignore[no-untyped-call]
        return exchanged

    def _split(self, given: Any) -> tuple[dict[Any, Any]]:
        """Return the batch with this process's part of each column that has the sequence."""
        batch = given[0] if len(given) == 1 else given
        if not isinstance(batch, Mapping):
            raise DataError(
                "context_parallel splits columns of a mapping, by the names in"
                f" ModelInfo(sequence_columns=...); the batch is a {type(batch).__name__}. In a loop of your"
                " own call the model with the batch alone; its forward then returns the loss"
            )
        if self._weight is not None and self._weight_of_whole is None:
            self._weight_of_whole = _number(self._weight(batch))
        for each in self._zeros:
            each.remove()
        self._exchanges, self._zeros = [], []
        parts = {name: self._part(name, batch) for name in self._columns}
        self._lengths = {each.shape[1] for each in parts.values()}
        return ({**batch, **parts},)

    def _part(self, name: str, batch: Mapping[Any, Any]) -> Tensor:
        column = batch.get(name)
        if not isinstance(column, Tensor) or column.ndim < 2:
            shown = list(column.shape) if isinstance(column, Tensor) else type(column).__name__
            raise DataError(
                f"ModelInfo(sequence_columns=...) of {self._kind} names {name!r}, which must be a tensor"
                f" [samples, positions, ...] in each batch, not {shown}. The batch has"
                f" {', '.join(map(repr, batch))}"
            )
        if over := column.shape[1] % self._size:
            raise DataError(
                f"context_parallel={self._size} does not divide the {column.shape[1]} positions of"
                f" {name!r}. Pad each batch to a multiple, here {column.shape[1] + self._size - over}"
            )
        return column.chunk(self._size, 1)[self._rank].contiguous()

    def _join(self, part: Any, output: Any) -> Any:
        """Return the means of a step's values over the parts, each with the weight of the part's loss."""
        exchanges, self._exchanges = self._exchanges, None
        try:
            read: Any = read_output(output)
        except ConfigError as error:
            raise StrategyError(f"{SCALARS_ONLY}; a step must return numbers: {error}") from error
        loss, names, values, _, media, terms = read
        if apart := terms or media:
            raise StrategyError(f"context_parallel joins numbers, not terms or media: {', '.join(apart)}")
        if values is None:
            return None
        # Read, because a part without weight needs another backward; on an accelerator this waits for it.
        weight = 1.0 if self._weight is None else _number(self._weight(part))
        sums = torch.zeros(1 + len(names), dtype=wide_dtype(values.device), device=values.device)
        if weight:
            sums[0], sums[1:] = weight, values.to(sums.dtype) * weight
        distributed.all_reduce(sums, group=self._group)
        if self._weight_of_whole is not None and not math.isnan(self._weight_of_whole):
            self._check_weights(_number(sums[0]), len(part[next(iter(self._columns))]))
        joined = dict(zip(names, (sums[1:] / sums[0]).to(values.dtype), strict=True))
        if loss is not None:
            whole = joined.pop("loss").to(loss.dtype)
            if not weight and loss.requires_grad:
                self._zeros = zero_nodes([loss.grad_fn], exchanges or ())
            # Times the number of parts, because the strategy averages over the processes.
            share = weight * self._size / sums[0]
            loss = _Joined.apply(loss, whole, share)  # type: ignore[no-untyped-call]
        return StepOutput(loss, metrics=joined) if joined else loss

    def _check_weights(self, of_parts: float, samples: int) -> None:
        """Check the weights of the first batch: a loss that shifts labels itself loses some between parts."""
        whole, self._weight_of_whole = self._weight_of_whole or 0.0, math.nan
        gives = f"{self._kind}.loss_weight gives {whole:g} for a batch, and {of_parts:g} for its"
        if whole not in (0, samples) and math.isclose(of_parts, whole * self._size, rel_tol=1e-4):
            raise ConfigError(
                f"{gives} {self._size} parts together: it reads no column that is split, so a part with few"
                " labels would count as much as one with many. Sum over the positions of a split column, such"
                " as (batch['labels'] != -100).sum()"
            )
        if not any(math.isclose(of_parts, whole * times, rel_tol=1e-4) for times in (1, self._size)):
            raise ConfigError(
                f"{gives} {self._size} parts together. Shift labels where batches are made, so that the label"
                " of a position is the token after it"
            )


def _number(given: Any) -> float:
    """Return a weight as a number; 1 for a tensor of another class, a plan's without a value."""
    return 1.0 if isinstance(given, Tensor) and type(given) is not Tensor else float(given)


class _Exchange(torch.autograd.Function):
    """An all-to-all: divides a tensor along one dimension, and gathers it along another."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, divided: int, gathered: int, group: Group) -> Tensor:
        ctx.others = gathered, divided, group
        return _exchanged(given, divided, gathered, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], *ctx.others), None, None, None


def _exchanged(given: Tensor, divided: int, gathered: int, group: Group) -> Tensor:
    sent = torch.stack(given.chunk(group.size(), divided))
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gathered)


class _Joined(torch.autograd.Function):
    """The loss of a whole sample, whose gradient goes into the loss of a part."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, whole: Tensor, share: Tensor) -> Tensor:
        ctx.share = share
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (gradients[0] * ctx.share).to(gradients[0].dtype), None, None
