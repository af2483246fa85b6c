"""A shuffled order that puts samples of similar lengths into the same step."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.random_streams import preserved
from drivetrain.core.validation import count

_GROUPS = 50
"""Groups in a sorted part of the shuffled data: more give closer lengths and a less random order."""


class LengthGroupedSampler(Sampler[int]):
    """A sampler for `DataLoader(sampler=...)` that puts samples of similar lengths into the same step.

    The data is shuffled, sorted by length in parts of 50 groups, and cut into groups, whose order is shuffled
    again. The group with the longest sample comes first, so that too little memory shows at once. As for
    every sampler, the order of an epoch is a function of (seed, epoch).

    Args:
        lengths: The length of each sample.
        group_size: The number of samples in a group: give the number in one step over all processes. Another
            group size gives another order.

    Raises:
        ConfigError: There are no lengths, or `group_size` is less than 1.
    """

    def __init__(self, lengths: Sequence[int] | Tensor, group_size: int) -> None:
        if not len(lengths):
            raise ConfigError("lengths must have the length of each sample; it is empty")
        self._lengths = torch.as_tensor(lengths)
        self._group_size = count("group_size", group_size, at_least=1)

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        total, size = len(self), self._group_size
        part = size * max(1, min(_GROUPS, total // (4 * size)))
        ordered = torch.cat(
            [
                each[self._lengths[each].argsort(descending=True, stable=True)]
                for each in torch.split(torch.randperm(total), part)
            ]
        )
        groups = ordered[: total - total % size].view(-1, size)
        groups = groups[torch.randperm(len(groups))]
        if len(groups):
            longest = int(self._lengths[groups].amax(1).argmax())
            groups[[0, longest]] = groups[[longest, 0]]
        yield from torch.cat((groups.flatten(), ordered[len(groups) * size :])).tolist()


def lengths_of(
    dataset: Any, spec: str | Callable[[Any], int], name: str, argument: str = "group_by_length"
) -> list[int]:
    """Return the length of each sample of a dataset. The random streams do not move.

    Args:
        dataset: A dataset with a length.
        spec: A column that holds the length, or what has it, such as tokens; or a function of a sample.
        name: The data's name, for messages.
        argument: What the user has given as `spec`, for messages.
    """
    with preserved():
        if callable(spec):
            values = [spec(dataset[index]) for index in range(len(dataset))]
        elif spec in getattr(dataset, "column_names", ()):
            values = list(dataset[spec])
        else:
            values = [_column(dataset[index], spec, name, argument) for index in range(len(dataset))]
    return [_length(value, spec, name, argument) for value in values]


def _column(sample: Any, column: str, name: str, argument: str) -> Any:
    try:
        return sample[column]
    except (KeyError, IndexError, TypeError):
        raise DataError(
            f"{argument}={column!r}: a sample of the {name} data, a {type(sample).__name__}, has no such"
            " column. Give a column of the samples, or a function of a sample that returns its length"
        ) from None


def _length(value: Any, spec: object, name: str, argument: str) -> int:
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, numbers.Real):
        return int(float(value))
    try:
        return len(value)
    except TypeError:
        raise DataError(
            f"{argument}={spec!r}: a sample of the {name} data gave a {type(value).__name__}. It"
            " must be a number, or have a length"
        ) from None
