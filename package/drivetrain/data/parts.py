"""Batches cut into smaller ones by samples, and the outputs of these put together again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from drivetrain.containers import opened
from drivetrain.data.batch import batch_size
from drivetrain.errors import DataError
from drivetrain.types import Batch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
"""What is the same for every sample, or one of a list that has one for each."""

_NAMES = (str, bytes, bool, torch.dtype, torch.device)
"""What an output may say of a whole batch: equal for all parts, it holds for the whole too."""


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """A batch as several of at most `size` samples, in their order; their tensors are views of its own.

    They are as few as can be, and as even: no two differ by more than one sample, so that none is left with a
    single one, of which batch norm has no variance, where that can be helped.

    Every tensor or array in it has the samples as its first dimension, or is the same for all of them:
    without a dimension, or with a first one of 1. So has every list of texts and numbers in a column of the
    batch, or it is the same for all of them.

    Raises:
        DataError: Something in it cannot be split by samples; says what.
    """
    number = batch_size(batch)
    if number is None or number <= size:
        return [batch]
    count = -(-number // size)
    least, more = divmod(number, count)
    starts = [each * least + min(each, more) for each in range(count + 1)]
    return [_piece(batch, number, *ends, True) for ends in pairwise(starts)]


def _piece(value: Any, number: int, start: int, stop: int, outermost: bool = False) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return _rows(value, number, start, stop)
    if isinstance(value, PackedSequence):
        raise DataError(
            "a PackedSequence cannot be split by samples: its rows are time steps. Give the padded tensor and"
            " the lengths, and pack them in the task's forward"
        )
    if isinstance(value, _PLAIN):
        return value
    container = opened(value)
    if container is not None:
        if isinstance(value, Sequence) and not hasattr(value, "_make") and not outermost:
            return _piece_of_list(value, number, start, stop)
        return container.rebuild([_piece(each, number, start, stop) for each in container.entries])
    raise DataError(
        f"a {type(value).__name__} cannot be split by samples. What can be: tensors whose first dimension is"
        " the samples, in mappings, sequences and dataclasses"
    )


def _rows(value: Any, number: int, start: int, stop: int) -> Any:
    if value.ndim == 0:
        return value
    if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
        raise DataError(f"a tensor of layout {value.layout} cannot be split by samples; give a dense one")
    if value.shape[0] == number:
        return value[start:stop]
    if value.shape[0] == 1:
        return value
    kind = "a tensor" if isinstance(value, Tensor) else "an array"
    raise DataError(
        f"a batch of {number} samples has {kind} of shape {tuple(value.shape)}, which cannot be split by"
        " samples: its first dimension is another one. What is the same for all samples, such as a mask of"
        " positions, is made in the task's forward or kept in a buffer, or has a leading dimension of one"
    )


def _piece_of_list(value: Any, number: int, start: int, stop: int) -> Any:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, _PLAIN) for each in value):
        # Of three tensors in a batch of three samples nobody can say whether each is one sample's.
        raise DataError(
            f"a {type(value).__name__} inside of a batch cannot be split by samples: it may have one entry"
            " for each sample, or one for each column. Use a mapping for columns, and one tensor for samples"
        )
    return value[start:stop] if len(value) == number else value


class _Apart(Exception):  # noqa: N818 - an answer
    """Why outputs cannot be put together."""


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What a step gave for the parts of a batch, as it would have given it for the whole.

    Args:
        outputs: One for each part, in order.
        sizes: How many samples each part has.

    Raises:
        DataError: They have no entry for each sample, or entries of different shapes, so that nobody can say
            what they are of the whole; says which.
    """
    if len(outputs) == 1:
        return outputs[0]
    try:
        return _joined(outputs, sizes)
    except _Apart as reason:
        raise DataError(
            f"predict_step gave a {type(outputs[0]).__name__} for each of {len(outputs)} parts of a batch,"
            f" which cannot be put together: {reason}. Return tensors whose first dimension is the samples,"
            " by name in a mapping, or use smaller batches, which are not split"
        ) from None


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    if any(type(each) is not type(first) for each in outputs):
        raise _Apart(f"they are of kinds {', '.join(sorted({type(each).__name__ for each in outputs}))}")
    if isinstance(first, (Tensor, np.ndarray)):
        return _joined_rows(outputs, sizes)
    if isinstance(first, (tuple, list)) and not hasattr(first, "_make"):
        return _joined_sequences(outputs, sizes)
    if first is None:
        return None
    container = opened(first)
    if container is None:
        raise _Apart(f"a {type(first).__name__} has not one entry for each sample")
    containers = [opened(each) for each in outputs]
    if any(each is None or list(each.names) != list(container.names) for each in containers):
        raise _Apart("their keys differ")
    columns = zip(*(each.entries for each in containers if each is not None), strict=True)
    entries = [_joined_entry(*named, sizes) for named in zip(container.names, columns, strict=True)]
    return container.rebuild(entries)


def _joined_entry(name: Any, column: Sequence[Any], sizes: Sequence[int]) -> Any:
    if isinstance(column[0], _NAMES) and all(each == column[0] for each in column):
        return column[0]
    try:
        return _joined(column, sizes)
    except _Apart as reason:
        raise _Apart(f"{name!r}: {reason}") from None


def _joined_rows(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    for each, number in zip(outputs, sizes, strict=True):
        if not each.ndim or each.shape[0] != number:
            shape = tuple(each.shape)
            raise _Apart(f"of shape {shape} for {number} samples, it has not one entry for each sample")
    shapes = list(dict.fromkeys(tuple(each.shape) for each in outputs))
    if len({shape[1:] for shape in shapes}) > 1:
        raise _Apart(
            f"their shapes are {', '.join(map(str, shapes))}, as of outputs that are padded to the longest of"
            " their batch. Pad all to one length, or return a list with a tensor for each sample"
        )
    return torch.cat(list(outputs)) if isinstance(outputs[0], Tensor) else np.concatenate(outputs)


def _joined_sequences(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    columns, reason = None, "their lengths differ"
    if len({len(each) for each in outputs}) == 1:
        try:
            columns = [_joined(each, sizes) for each in zip(*outputs, strict=True)]
        except _Apart as apart:
            reason = str(apart)
    per_sample = all(len(each) == n for each, n in zip(outputs, sizes, strict=True))
    if columns is None and not per_sample:
        raise _Apart(reason)
    if columns is not None and per_sample and _alike(first):  # one of them would be wrong
        raise _Apart(
            f"a {type(first).__name__} of {len(first)} for {len(first)} samples may have an entry for each"
            " sample, or be columns"
        )
    whole = columns if columns is not None else [each for one in outputs for each in one]
    return whole if isinstance(first, list) else tuple(whole)


def _alike(entries: Sequence[Any]) -> bool:
    """Whether these may be the same thing of several samples."""
    kinds = {(type(each), getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in entries}
    return len(kinds) <= 1
