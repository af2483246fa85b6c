"""A step of one rank without the other ranks and without values: its memory, and its collectives in order.

The step is that of a run: the engine's, on the strategy that was asked for. Its tensors are torch's fake
ones, and the other ranks are those of torch's "fake" process group, whose collectives return at once.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.callbacks.statistics.flops import FlopCount
from drivetrain.core.calendar import RunLength
from drivetrain.core.types import Batch
from drivetrain.data import MicroBatch, batch_size
from drivetrain.engine.engine import Engine
from drivetrain.engine.memory_profile import MemoryWatch
from drivetrain.run.settings import RunSettings
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Memory
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.single import SingleDevice
from drivetrain.strategies.wrapping import batch_norms
from drivetrain.task.optim.quantized import is_quantized, parts_of, uncompiled
from drivetrain.task.task import TaskModule
from drivetrain.trainer.plan.answers import Answers, fake, without_values
from drivetrain.trainer.plan.memory import Unknown, tried

_TORCH: Any = distributed
"""With the names that it does not export."""

_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "gather")

_OF_STRATEGIES = ("c10d", "fsdp")
"""The namespaces of operations on a strategy's own buffers."""

_OF_DTENSORS = "_c10d_functional"

_META = torch.device("meta")
"""The device of the storages of tensors without values."""

_LIKE_ALL = 3
"""Micro-batches that are run: all between the first and the last of a window are like the second."""


@dataclass(frozen=True)
class Collective:
    """A collective of a step.

    Attributes:
        kind: Such as "all_gather".
        ranks: How many ranks take part.
        bytes: The size of the whole tensor: of the result of a gathering, of what is reduced or scattered.
        dtype: What is sent, such as "bfloat16".
    """

    kind: str
    ranks: int
    bytes: int
    dtype: str

    @property
    def sent(self) -> int:
        """The bytes that each rank sends, if the ranks form a ring: an all-reduce goes round twice."""
        return self.bytes * (1 + (self.kind == "all_reduce")) * (self.ranks - 1) // self.ranks


class FakeStep(NamedTuple):
    """The memory, collectives and floating-point operations of a step.

    Attributes:
        states: Bytes of the first rank's "parameters", "gradients" and "optimizer" states, and of the whole
            states as "saved"; None if the optimizers refuse gradients without values.
        is_own: Whether the strategy itself has run.
        kept: Bytes that the forward of a micro-batch keeps for its backward, and the batch; None if unknown.
        at_peak: Bytes at the peak of the step by the kinds of `MemoryUse`, and "gathered".
        collectives: Those of the step, in order; None if they are others in a run.
        flops: Floating-point operations of its forwards and backwards, without recomputation; None if some
            are not known.
        unknown: Why all after `is_own` is unknown.
    """

    states: dict[str, int | None]
    is_own: bool
    kept: int | None = None
    at_peak: Mapping[str, int] = {}
    collectives: tuple[Collective, ...] | None = None
    flops: int | None = None
    unknown: str = ""


class StepWatch(MemoryWatch):  # type: ignore[no-untyped-call]
    """Watches the memory and the collectives of a step.

    Tensors that a strategy exchanges or gathers have the kind "gathered".
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        space = func.namespace
        if space in _OF_STRATEGIES:
            for memory in self.of(tree_leaves((args, kwargs, result))):
                if memory.kind in ("activations", "other"):
                    memory.kind = "gathered"
        if space in ("c10d", _OF_DTENSORS):
            name = func.name().partition("::")[2].replace("_", "")
            kind = next((each for each in _KINDS if name.startswith(each.replace("_", ""))), None)
            if kind is not None:
                self.collectives.append(_collective(kind, args, result))
        return result

    def now(self, kind: str, without: Iterable[object] = ()) -> int:
        """Return the bytes of a kind that exist now."""
        left_out = {id(each) for each in self.of(without)}
        return sum(
            each.size for each in self._held.values() if each.kind == kind and id(each) not in left_out
        )


def _collective(kind: str, args: tuple[Any, ...], result: Any) -> Collective:
    sides = [[each for each in tree_leaves(side) if isinstance(each, Tensor)] for side in (*args, result)]
    if any(each.is_sparse for side in sides for each in side):
        raise Unknown("the processes exchange sparse gradients, whose sizes depend on values")
    sizes = [sum(each.nbytes for each in side) for side in sides]
    dtype = next(each.dtype for side in sides for each in side)
    return Collective(kind, _group_size(args), max(sizes), str(dtype).removeprefix("torch."))


def _group_size(args: tuple[Any, ...]) -> int:
    """Return the size of the group among the arguments: the first object of torch's, or the last text."""
    boxed = [each for each in args if isinstance(each, torch.ScriptObject)]
    if boxed:
        return distributed.ProcessGroup.unbox(boxed[0]).size()
    return _TORCH.distributed_c10d._resolve_process_group(args[-1]).size()  # type: ignore[no-any-return]


def fake_step(
    settings: RunSettings,
    strategy: Strategy,
    task: TaskModule,
    batch: Batch | None,
    accumulation: int,
    length: RunLength,
    memory: Memory | None,
) -> FakeStep:
    """Make a step of a copy of a task as the first rank of a run.

    Args:
        batch: A micro-batch of the data; None measures the states alone.
        accumulation: Micro-batches of the data in the step.
        memory: What a process holds under the strategy; None if that is not known.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    made, precision = _on_fake_ranks(strategy, settings.num_nodes), as_precision(settings.precision)
    own, answers = made.name == strategy.name, Answers()
    with (
        _fake_ranks(made.world_size),
        Engine(made, precision, seed=settings.seed, memory=settings.memory) as engine,
        torch.compiler.set_stance("force_eager"),
        FakeTensorMode(allow_non_fake_inputs=True),
        answers,
    ):
        copy = without_values(task)
        vars(copy)["_apply"] = partial(_apply, copy)
        with _buckets(made), _FirstChunks():
            engine.prepare_task(
                copy,
                total_steps=length.steps,
                calendar=length.calendar,
                max_grad_norm=settings.max_grad_norm,
                max_grad_value=settings.max_grad_value,
                micro_batch=settings.micro_batch if isinstance(settings.micro_batch, int) else None,
            )
        if isinstance(engine.model, DistributedDataParallel):
            engine.model.reducer = _Reducer(engine.model.reducer)  # type: ignore[assignment]
        as_stored = None if own or memory is None else memory.forward_dtype
        step = FakeStep(_states(engine, copy, answers, as_stored), own)
        if batch is None:
            return step
        batch = tree_map(fake, batch)
        measured, why = tried(_measured, step, step, engine, copy, batch, accumulation, answers)
        return measured._replace(unknown=why)


def _states(
    engine: Engine, copy: TaskModule, answers: Answers, as_stored: torch.dtype | None
) -> dict[str, int | None]:
    """Return the bytes of parameters, gradients and states, after a step with gradients without values.

    Args:
        as_stored: The dtype of the weights, if it is not that of the optimizer's copies.
    """
    optimizers = [each.optimizer for each in engine.updaters.values()]
    trained = [each for each in copy.parameters() if each.requires_grad]
    copies = 0 if as_stored is None else sum(each.nbytes for each in trained)
    for each in trained:
        each.grad = torch.empty_like(each)
    with answers.answering(1.0):  # no state's size depends on a number
        saved, _ = tried(_saved, None, optimizers)
    if as_stored is not None:
        _convert(copy, as_stored)
    watch = StepWatch(copy, optimizers, _META)
    sizes = watch.now("optimizer"), sum(each.size for each in watch.of(trained))
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.state.clear()
    return {
        "parameters": watch.now("parameters"),
        "gradients": sizes[1],
        "optimizer": None if saved is None else copies + sizes[0],
        "saved": None if saved is None else copies + saved,
    }


def _saved(optimizers: Sequence[Optimizer]) -> int:
    """Make a step; return the bytes of the states of all ranks together."""
    for each in optimizers:
        with uncompiled(each):
            each.step()
    kept = (each for each in tree_leaves([each.state for each in optimizers]) if isinstance(each, Tensor))
    parts = (parts_of("", each).values() if is_quantized(each) else (each,) for each in kept)
    return sum(part.nbytes for each in parts for part in each)


def _measured(
    step: FakeStep, engine: Engine, copy: TaskModule, batch: Batch, accumulation: int, answers: Answers
) -> FakeStep:
    """Return the measures of a step after another step."""
    optimizers = [each.optimizer for each in engine.updaters.values()]
    for each in optimizers:  # which divide by what they read
        each.register_step_pre_hook(lambda *_: setattr(answers, "number", 1.0))
        each.register_step_post_hook(lambda *_: setattr(answers, "number", 0.0))
    samples = batch_size(batch) or 1
    micro_batch = MicroBatch(batch, float(samples), samples)
    backward, update = engine.strategy.backward, engine.update
    kept, measured, ends = 0, -1, list[int]()

    def noting(*args: Any, **kwargs: Any) -> None:
        nonlocal kept
        if measured > 0 and (engine.interleaved or engine.passes == measured):
            gradients = (each.grad for each in copy.parameters())
            kept = max(kept, watch.now("activations", gradients))
        backward(*args, **kwargs)
        if measured > 0:
            ends.append(len(watch.collectives))

    def updating(*args: Any) -> tuple[bool, Tensor | None]:
        with answers.answering(0.0):  # an overflow of the loss scale is a number that is not zero
            return update(*args)

    vars(engine.strategy)["backward"], vars(engine)["update"] = noting, updating
    train_step = (engine.splitter or engine).train_step
    with closing(FlopCount()) as flops:
        train_step([micro_batch])  # after which a strategy's buffers exist
        flops.read()
    measured = engine.passes + 1
    # The micro-batches of a generator step run side by side.
    run = accumulation if engine.interleaved else min(accumulation, _LIKE_ALL)
    with StepWatch(copy, optimizers, _META, batch) as watch:
        train_step([micro_batch] * run)
    counted = 0 if flops.failed is not None else int(flops.read_at or 0) * accumulation
    found = _of_window(watch.collectives, ends, accumulation - run) if step.is_own else None
    return step._replace(kept=kept, at_peak=watch.at_peak(), collectives=found, flops=counted or None)


def _of_window(found: Sequence[Collective], ends: Sequence[int], more: int) -> tuple[Collective, ...]:
    """Return the collectives of a window with more micro-batches like the second of three.

    Args:
        ends: Where those of each backward end.
    """
    first, second = (ends[number * len(ends) // _LIKE_ALL - 1] if more else 0 for number in (1, 2))
    return (*found[:second], *(*found[first:second],) * more, *found[second:])


def _on_fake_ranks(strategy: Strategy, nodes: int) -> Strategy:
    """Return a strategy's like on the CPU; one process stands for those that bring their own processes."""
    if not isinstance(strategy, (DDP, FSDP)):
        return SingleDevice()
    options: dict[str, Any] = {"sync_batchnorm": False}  # which needs GPUs
    if isinstance(strategy, FSDP):
        size = strategy.shards(strategy.world_size // nodes) if strategy.config.sharding == "hybrid" else None
        options |= {"gather_at_end": False, "shard_size": size}
    config: Any = dataclasses.replace(strategy.config, **options)
    return type(strategy)(config, device="cpu", world_size=strategy.world_size)


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    """Run the block as the first rank of a job whose other ranks are torch's "fake" ones."""
    from torch._subclasses import fake_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if world_size == 1 and distributed.is_initialized():
        yield
        return
    if distributed.is_initialized():
        raise Unknown("this process is a rank of a job already; plan before the first fit")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    log = fake_tensor.log  # torch also logs each error that it raises
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.disabled = before
        distributed.destroy_process_group()


@contextmanager
def _buckets(strategy: Strategy) -> Iterator[None]:
    """Let DDP make its buckets in the block as `fix_buckets` does, which needs values."""
    of_torch = _TORCH._compute_bucket_assignment_by_size
    if (
        not isinstance(strategy, DDP)
        or strategy.config.static_graph
        or strategy.config.find_unused_parameters
    ):
        yield
        return
    limits = [int(strategy.config.bucket_mb * 2**20)]

    def assign(tensors: list[Tensor], _: object, sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
        buckets, sizes = of_torch(tensors[::-1], limits, sparse[::-1])
        last = len(tensors) - 1
        return [[last - each for each in bucket] for bucket in reversed(buckets)], sizes[::-1]

    _TORCH._compute_bucket_assignment_by_size = assign
    try:
        yield
    finally:
        _TORCH._compute_bucket_assignment_by_size = of_torch


class _FirstChunks(TorchFunctionMode):
    """Cuts only the first chunk of a tensor, that of the first rank: a thousand take a minute."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.chunk or is_quantized(args[0]):
            return func(*args, **(kwargs or {}))
        return _first_chunk(*args, **(kwargs or {}))


def _first_chunk(input: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    return [input.narrow(dim, 0, -(-input.shape[dim] // chunks))] * chunks


class _Reducer:
    """DDP's, whose buckets are not made anew."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return bool if name == "_rebuild_buckets" else getattr(self._reducer, name)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert the tensors of a module in place, which torch's `_apply` does not do for fake ones."""
    for each in (*module.parameters(), *module.buffers()):
        if not is_quantized(each):
            each.data = function(each)
    return module


def _convert(copy: nn.Module, dtype: torch.dtype) -> None:
    """Convert all weights except those of batch norms."""
    norms = {id(each) for norm in batch_norms(copy) for each in norm.parameters()}
    for each in copy.parameters():
        if each.is_floating_point() and id(each) not in norms:
            each.data = each.to(dtype)
