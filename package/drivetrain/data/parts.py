"""Batches cut into smaller ones by samples, and the outputs of these put together again."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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

    Every tensor in it has the samples as its first dimension, or no dimension. So has every list of texts and
    numbers in a column of the batch, or it is the same for all of them.

    Raises:
        DataError: Something in it cannot be split by samples; says what.
    """
    number = batch_size(batch)
    if number is None or number <= size:
        return [batch]
    return [_piece(batch, number, start, start + size, True) for start in range(0, number, size)]


def _piece(value: Any, number: int, start: int, stop: int, outermost: bool = False) -> Any:
    if isinstance(value, Tensor):
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


def _rows(tensor: Tensor, number: int, start: int, stop: int) -> Tensor:
    if tensor.ndim == 0:
        return tensor
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise DataError(f"a tensor of layout {tensor.layout} cannot be split by samples; give a dense one")
    if tensor.shape[0] != number:
        raise DataError(
            f"a batch of {number} samples has a tensor of shape {tuple(tensor.shape)}, which cannot be split"
            " by samples: its first dimension is another one"
        )
    return tensor[start:stop]


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


def join_outputs(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What a step gave for the parts of a batch, as it would have given it for the whole.

    Args:
        outputs: One for each part, in order.
        sizes: How many samples each part has.

    Raises:
        DataError: They have no entry for each sample, so that nobody can say what they are of the whole.
    """
    if len(outputs) == 1:
        return outputs[0]
    joined = _joined(outputs, sizes)
    if joined is None:
        raise DataError(
            f"predict_step gave a {type(outputs[0]).__name__} for each of {len(outputs)} parts of a batch,"
            " which cannot be put together: it has not one entry for each sample. Return tensors whose first"
            " dimension is the samples, or use a smaller batch"
        )
    return joined[0]


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> tuple[Any] | None:
    first = outputs[0]
    if any(type(each) is not type(first) for each in outputs):
        return None
    if isinstance(first, Tensor):
        fit = all(each.ndim and each.shape[0] == n for each, n in zip(outputs, sizes, strict=True))
        return (torch.cat(list(outputs)),) if fit else None
    if isinstance(first, Mapping):
        if any(each.keys() != first.keys() for each in outputs):
            return None
        columns = {key: _joined([each[key] for each in outputs], sizes) for key in first}
        if None in columns.values():
            return None
        return (like_mapping(first, {key: each[0] for key, each in columns.items() if each is not None}),)
    if isinstance(first, (tuple, list)):
        return _joined_sequences(outputs, sizes)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        clone = copy.copy(first)
        for field in dataclasses.fields(first):
            column = _joined([getattr(each, field.name) for each in outputs], sizes)
            if column is None:
                return None
            object.__setattr__(clone, field.name, column[0])
        return (clone,)
    return (None,) if first is None else None


def _joined_sequences(outputs: Sequence[Any], sizes: Sequence[int]) -> tuple[Any] | None:
    first = outputs[0]
    columns = None
    if len({len(each) for each in outputs}) == 1:
        found = [_joined(each, sizes) for each in zip(*outputs, strict=True)]
        columns = None if None in found else [each[0] for each in found if each is not None]
    per_sample = all(len(each) == n for each, n in zip(outputs, sizes, strict=True))
    if hasattr(first, "_make"):
        return None if columns is None else (first._make(columns),)
    if (columns is None) == (not per_sample):  # neither, or both, of which one would be wrong
        return None
    whole = columns if columns is not None else [each for one in outputs for each in one]
    return (whole if isinstance(first, list) else tuple(whole),)
