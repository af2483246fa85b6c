"""A micro-batch made of the first sample, and the size of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.int_schedule import at_start
from drivetrain.core.types import Batch
from drivetrain.data.split_source import AlreadySplit
from drivetrain.distributed.failure.location import users_line
from drivetrain.run.settings import RunSettings
from drivetrain.strategies.base import Memory
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule
from drivetrain.trainer.plan.optimizers import Built


class Unknown(Exception):  # noqa: N818 - the reason is a value here, which the plan shows
    """A part of a plan that cannot be known beforehand; its text is the reason."""


def example_batch(settings: RunSettings, task: TaskModule, data: Any) -> Batch:
    """Return a micro-batch of copies of the first sample: no other is fetched.

    Raises:
        Unknown: The data is a stream, or a batch sampler chooses the sizes.
    """
    data = data.data if isinstance(data, AlreadySplit) else data
    if isinstance(data, (list, tuple)):
        return data[0]
    samples, sampler = (data.dataset, data.batch_sampler) if isinstance(data, DataLoader) else (data, None)
    if isinstance(samples, IterableDataset) or not hasattr(samples, "__getitem__"):
        raise Unknown("the training data is a stream, and a plan draws nothing from it")
    if not isinstance(data, DataLoader):
        size = at_start(settings.batch_size) or getattr(data, "batch_size", None) or 1
        return (settings.collate or info_of(task).collate or default_collate)([samples[0]] * size)
    if sampler is None:
        return data.collate_fn(samples[0])
    size = data.batch_size or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        raise Unknown("a batch sampler chooses the sizes of the batches")
    return data.collate_fn([samples[0]] * size)


def checkpoint_size(settings: RunSettings, task: TaskModule, built: Built) -> int | None:
    """Return the bytes of a checkpoint's tensors: weights, buffers and the optimizers' state.

    The files' headers, and the states of callbacks and of the data, are not counted.
    """
    policy = next(iter(chosen_policies(settings.checkpoint)), None)
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


def reason(error: Exception) -> str:
    """Return why a step without values has failed, with the line of the user's program."""
    if isinstance(error, Unknown):
        return str(error)
    name, text, line = type(error).__name__, " ".join(str(error).split()), users_line(error)
    where = f" at {line}" if line else ""
    if name == "DataDependentOutputException" or "not supported for tensor subclasses" in text:
        return (
            f"the step reads a value of a tensor{where}, and the tensors of a plan are without values."
            " Compute with tensors instead, such as by torch.where"
        )
    if name == "DynamicOutputShapeException":
        return (
            f"{text.split('.')[1]} returns as many elements as values say{where}, and the tensors of a"
            " plan are without values. Multiply by a mask, or use torch.where"
        )
    return f"{name}{where}: {text[:120]}{'...' if len(text) > 120 else ''}"
