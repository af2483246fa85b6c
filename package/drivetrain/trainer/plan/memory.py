"""The memory of a planned fit beside weights and optimizers, by one micro-batch without values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.int_schedule import at_start
from drivetrain.core.types import Batch
from drivetrain.data.split_source import AlreadySplit
from drivetrain.engine.memory import as_memory
from drivetrain.engine.memory_profile import MemoryWatch
from drivetrain.run.settings import RunSettings
from drivetrain.strategies.base import Memory, Strategy
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.fsdp.tensor_parallel import TensorParallel, split_modules
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.transforms.recompute import Recomputation
from drivetrain.strategies.wrapping import apply_tied, batch_norms
from drivetrain.task.model_info import info_of
from drivetrain.task.output import read_output
from drivetrain.task.task import StepModule, TaskModule
from drivetrain.trainer.plan.optimizers import Built, on_meta

_CPU = torch.device("cpu")
"""The device of tensors without values. Fake ones of a GPU start CUDA, and no fork could use it then."""


class StepMemory(NamedTuple):
    """The memory of one micro-batch, in bytes.

    Attributes:
        activations: What its forward keeps for backward, the batch, and a block's activations while it is
            recomputed.
        temporary: What is there besides at the peak: the model's outputs, such as logits, and the gradients
            of activations.
    """

    activations: int
    temporary: int


class Unknown(Exception):  # noqa: N818 - the reason is a value here, which the plan shows
    """A part of a plan that cannot be known beforehand; its text is the reason."""


def example_batch(settings: RunSettings, task: TaskModule, data: Any, limit: int | None = None) -> Batch:
    """Return a micro-batch of copies of the first sample: no other is fetched.

    Raises:
        Unknown: The data is a stream, or its first sample or batch raises.
    """
    data = data.data if isinstance(data, AlreadySplit) else data
    try:
        if isinstance(data, (list, tuple)):
            return data[0]
        if isinstance(data, DataLoader):
            return _of_loader(data, limit)
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise Unknown("the training data is a stream, and a plan draws nothing from it")
        size = at_start(settings.batch_size) or getattr(data, "batch_size", None) or 1
        collate = settings.collate or info_of(task).collate or default_collate
        return collate([data[0]] * min(size, limit or size))
    except Unknown:
        raise
    except Exception as error:
        raise Unknown(f"no batch could be made of the first sample: {_short(error)}") from error


def _of_loader(data: DataLoader[Any], limit: int | None) -> Batch:
    dataset: Any = data.dataset
    if isinstance(dataset, IterableDataset):
        raise Unknown("the training data is a stream, and a plan draws nothing from it")
    if data.batch_sampler is None:
        return data.collate_fn(dataset[0])
    size = data.batch_size or getattr(data.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise Unknown("a batch sampler chooses the sizes of the batches")
    return data.collate_fn([dataset[0]] * min(size, limit or size))


def step_memory(settings: RunSettings, task: TaskModule, memory: Memory | None, batch: Batch) -> StepMemory:
    """Run one micro-batch on tensors that have shapes, dtypes and a device, but no values.

    Torch's fake tensors run the kernels' shape functions alone, so that neither memory nor an accelerator is
    needed. The task is a copy, and stays as it is.

    Raises:
        Unknown: The step needs values, as `tensor.item()` does, or raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    strategy, precision = settings.select_strategy(), as_precision(settings.precision)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    context = precision.forward_context(_CPU) or nullcontext
    try:
        copy: Any = precision.convert_module(on_meta(task))
        with _split_copy(strategy) as split:
            with mode:
                _make_fake(copy, None if memory is None else memory.forward_dtype)
                split(copy)
                fake = tree_map(_fake, batch)
            watch = MemoryWatch(copy, (), torch.device("meta"), fake)
            again = _recompute(settings, strategy, copy, watch)
            with mode, watch:
                kept, outputs = _run(copy, context, fake, watch)
    except Exception as error:
        raise Unknown(f"a step without values raises {_short(error)}") from error
    recomputed = max(again.values(), default=0)
    return StepMemory(kept + recomputed, max(0, outputs - recomputed))


@contextmanager
def _split_copy(strategy: Strategy) -> Iterator[Callable[[TaskModule], object]]:
    """Run the block with a function that splits a task's modules as the first process of `strategy` does.

    The other processes are torch's "fake" ones: its collectives return tensors of the right shapes.
    """
    config = getattr(strategy, "config", None)
    if not isinstance(config, FSDPConfig) or config.tensor_parallel == 1:
        yield lambda task: None
        return
    if distributed.is_initialized():
        raise Unknown(
            "tensor_parallel is planned with ranks of torch's own, and this process has a job already"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = config.tensor_parallel
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
        alone = replace(config, expert_parallel=False)  # a rank's own tokens are as many as it gets
        yield lambda task: TensorParallel(split_modules(task, alone), mesh).split(task)
    finally:
        distributed.destroy_process_group()


def _run(task: TaskModule, context: Any, batch: Batch, watch: MemoryWatch) -> tuple[int, int]:
    """Return the most bytes that a forward keeps for backward, and those that are there besides."""
    module = StepModule(task, context)
    module.use(task.training_step)
    before = watch.total
    found: Any = module(batch)
    kept = besides = 0
    if inspect.isgenerator(found):
        # Each loss has a graph of its own, which is freed before the next.
        for each in found:
            kept = max(kept, watch.total - before)
            besides = max(besides, _backward(task, tree_leaves(each), watch))
    else:
        loss, _, _, outputs, _, terms = read_output(found)
        for each in (terms or {}).values():
            loss = each.value if loss is None else loss + each.value
        del found, terms
        whole = watch.total
        del outputs
        kept = watch.total - before
        besides = whole - watch.total + _backward(task, [loss], watch)
    return kept + _size(tree_leaves(batch)), besides


def _backward(task: TaskModule, losses: Iterable[Any], watch: MemoryWatch) -> int:
    """Run a backward; returns the most bytes that were there besides those before it and the gradients."""
    before = watch.restart()
    try:
        for loss in losses:
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return max(0, watch.peak_without(each.grad for each in task.parameters()) - before)
    finally:
        for each in task.parameters():
            each.grad = None


def _size(values: Iterable[Any]) -> int:
    return sum(each.nbytes for each in values if isinstance(each, Tensor))


def _fake(value: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, Tensor):
        return value
    dtype = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=_CPU)


def _make_fake(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Replace the tensors of a copied module, on the meta device, by fake ones."""
    norms = {id(each) for norm in batch_norms(module) for each in norm.parameters()}

    def fake(tensor: Tensor) -> Any:
        is_cast = isinstance(tensor, nn.Parameter) and id(tensor) not in norms
        return _fake(tensor, dtype if is_cast else None)

    apply_tied(module, fake)


def _recompute(
    settings: RunSettings, strategy: Strategy, copy: TaskModule, watch: MemoryWatch
) -> dict[str, int]:
    """Make the blocks of the copy recompute as the settings say.

    The first block of each class also runs once without recomputation. The returned mapping then gets the
    bytes that such a block keeps.
    """
    sizes: dict[str, int] = {}
    plain = {id(each): each.forward for each in copy.modules()}
    again, config = as_memory(settings.memory).activation_checkpointing, getattr(strategy, "config", None)
    if not again and isinstance(config, FSDPConfig):
        again = config.activation_checkpointing
    blocks = Recomputation(copy, again).blocks

    def call(name: str, own: Any, recomputing: Any, *args: Any, **kwargs: Any) -> Any:
        if name not in sizes:
            before = watch.total
            outputs = own(*args, **kwargs)
            sizes[name] = watch.total - before
            del outputs
        return recomputing(*args, **kwargs)

    for block in {type(each): each for each in reversed(blocks)}.values():
        name = type(block).__qualname__
        vars(block)["forward"] = functools.partial(call, name, plain[id(block)], block.forward)
    return sizes


def checkpoint_size(settings: RunSettings, task: TaskModule, built: Built) -> int | None:
    """Return the bytes of a checkpoint's tensors: weights, buffers and the optimizers' state.

    The files' headers, and the states of callbacks and of the data, are not counted.
    """
    policy = next(iter(chosen_policies(settings.checkpoint)), None)
    if any(is_lazy(each) for each in task.parameters()):
        return None
    left_out = info_of(task).left_out if policy is None or policy.parameters != "all" else None
    if policy is not None and policy.parameters == "trainable":
        left_out = [name for name, each in task.named_parameters() if not each.requires_grad]
    tensors = {
        id(each): each.numel() * built.stored_dtype(each).itemsize
        for name, each in task.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor) and name not in (left_out or ())
    }
    whole = built.sizes(Memory())["optimizer"] if policy is None or policy.resumable else 0
    return None if whole is None else sum(tensors.values()) + whole


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"
