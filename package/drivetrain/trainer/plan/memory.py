"""A micro-batch made of the first sample, and the size of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.int_schedule import at_start
from drivetrain.core.types import Batch
from drivetrain.data.split_source import AlreadySplit
from drivetrain.run.settings import RunSettings
from drivetrain.strategies.base import Memory
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule
from drivetrain.trainer.plan.optimizers import Built


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
        raise Unknown(f"no batch could be made of the first sample: {short(error)}") from error


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


def short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}{'...' if len(text) > 120 else ''}"
