"""Batches cut into smaller ones by samples, and the outputs of these put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from drivetrain.data.batch import batch_size, like_mapping
from drivetrain.errors import DataError
from drivetrain.types import Batch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
"""What is the same for every sample, or one of a list that has one for each."""


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
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _piece(each, number, start, stop) for key, each in value.items()})
    if isinstance(value, (tuple, list)):
        return _piece_of_sequence(value, number, start, stop, outermost)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            part = _piece(getattr(value, field.name), number, start, stop)
            object.__setattr__(clone, field.name, part)  # past the guard of a frozen one
        return clone
    if isinstance(value, _PLAIN):
        return value
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


def _piece_of_sequence(value: Any, number: int, start: int, stop: int, outermost: bool) -> Any:
    named = hasattr(value, "_make")
    if not (outermost or named):
        if not all(isinstance(each, _PLAIN) for each in value):
            # Of three tensors in a batch of three samples nobody can say whether each is one sample's.
            raise DataError(
                f"a {type(value).__name__} inside of a batch cannot be split by samples: it may have one"
                " entry for each sample, or one for each column. Use a mapping for columns, and one tensor"
                " for samples"
            )
        return value[start:stop] if len(value) == number else value
    pieces = [_piece(each, number, start, stop) for each in value]
    if named:
        return value._make(pieces)
    return pieces if isinstance(value, list) else tuple(pieces)


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
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in outputs):
            raise _Apart("their keys differ")
        return like_mapping(first, {key: _joined([each[key] for each in outputs], sizes) for key in first})
    if isinstance(first, (tuple, list)):
        return _joined_sequences(outputs, sizes)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        clone = copy.copy(first)
        for field in dataclasses.fields(first):
            column = _joined([getattr(each, field.name) for each in outputs], sizes)
            object.__setattr__(clone, field.name, column)
        return clone
    if first is None:
        return None
    raise _Apart(f"a {type(first).__name__} has not one entry for each sample")


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
    if hasattr(first, "_make"):
        if columns is None:
            raise _Apart(reason)
        return first._make(columns)
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
