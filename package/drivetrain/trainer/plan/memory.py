"""A micro-batch made of the first sample, and the size of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from drivetrain.checkpoint.saving.config import CheckpointConfig, chosen_policies
from drivetrain.core.errors import ConfigError, DataError, StrategyError
from drivetrain.core.int_schedule import at_start
from drivetrain.core.types import Batch
from drivetrain.data.split_source import AlreadySplit
from drivetrain.distributed.failure.location import users_line
from drivetrain.run.settings import RunSettings
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule, overrides

T = TypeVar("T")


class Unknown(Exception):  # noqa: N818 - the reason is a value here, which the plan shows
    """A part of a plan that cannot be known beforehand; its text is the reason."""


def example_batch(settings: RunSettings, task: TaskModule, data: Any) -> tuple[Batch, int | None]:
    """Return a micro-batch of copies of the first sample, and its tokens if the task counts them.

    No other sample is fetched.

    Raises:
        Unknown: The data is a stream, or a batch sampler chooses the sizes.
    """
    batch = _batch(settings, task, data.data if isinstance(data, AlreadySplit) else data)
    return batch, (int(task.tokens(batch)) or None) if overrides(task, "tokens") else None


def _batch(settings: RunSettings, task: TaskModule, data: Any) -> Batch:
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


def checkpoint_size(settings: RunSettings, task: TaskModule, states: int | None) -> int | None:
    """Return the bytes of a checkpoint's tensors: weights, buffers and the optimizers' states.

    The files' headers, and the states of callbacks and of the data, are not counted.
    """
    if not settings.checkpoint:
        return None
    policy = (*chosen_policies(settings.checkpoint), CheckpointConfig())[0]
    left_out = None if policy.parameters == "all" else info_of(task).left_out
    if policy.parameters == "trainable":
        left_out = [name for name, each in task.named_parameters() if not each.requires_grad]
    stored = as_precision(settings.precision).param_dtype
    tensors = {
        id(each): each.numel() * ((each.is_floating_point() and stored) or each.dtype).itemsize
        for name, each in task.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor) and name not in (left_out or ())
    }
    whole = states if policy.resumable else 0
    return None if whole is None else sum(tensors.values()) + whole


def tried(function: Callable[..., T], default: T, *arguments: Any) -> tuple[T, str]:
    """Call a function; return its result and "", or the default and why the function has failed.

    Raises:
        DrivetrainError: What a fit would raise too.
    """
    try:
        return function(*arguments), ""
    except (ConfigError, DataError, StrategyError):
        raise
    except Exception as error:
        return default, _reason(error)


def _reason(error: Exception) -> str:
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
