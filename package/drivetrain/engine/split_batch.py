"""Splits batches by samples, and joins the outputs of batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from drivetrain.core.containers import opened
from drivetrain.core.errors import DataError
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
"""Types of values that hold for every sample, or that a list has one of for each sample."""

_CONSTANTS = (str, bytes, Number, torch.dtype, torch.device)
"""Types of outputs that may describe a whole batch: if equal for all batches, they hold for all."""


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into batches of at most `size` samples, in order; their tensors are views.

    There are as few parts as possible, and their sizes differ by at most one sample. So a part has a single
    sample only if that cannot be avoided; batch norm has no variance there.

    Every tensor or array has the samples as its first dimension, or is the same for all samples: without a
    dimension, or with a first one of 1. The same holds for every list of texts and numbers in a column.
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
        f"a {type(value).__name__} cannot be split by samples. Give tensors whose first dimension is"
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
        " samples: its first dimension is not the samples. Make a tensor that all samples share, such as a"
        " mask of positions, in the task's forward, keep it in a buffer, or give it a first dimension of one"
    )


def _piece_of_list(value: Any, number: int, start: int, stop: int) -> Any:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, _PLAIN) for each in value):
        # With three tensors in a batch of three samples, each may or may not be one sample's.
        raise DataError(
            f"a {type(value).__name__} inside of a batch cannot be split by samples: it may have one entry"
            " for each sample, or one for each column. Use a mapping for columns, and one tensor for samples"
        )
    return value[start:stop] if len(value) == number else value


class _NotJoinable(Exception):  # noqa: N818 - caught and turned into an error
    """The reason why outputs cannot be joined."""


def join_batches(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of batches as one output of all samples."""
    if not outputs:
        raise DataError("the data gave no batch, so there are no outputs to join. joined=False returns []")
    try:
        return _joined(outputs, sizes)
    except _NotJoinable as reason:
        raise DataError(
            f"joined=True cannot join the outputs of {len(outputs)} batch(es), each a"
            f" {type(outputs[0]).__name__}: {reason}. Every tensor needs one entry for each"
            " sample; without joined, predict returns a list with the outputs of each batch"
        ) from None


def _joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first, kinds = outputs[0], {*map(type, outputs)}
    if len(kinds) > 1:
        raise _NotJoinable(f"they are of kinds {', '.join(sorted(each.__name__ for each in kinds))}")
    if isinstance(first, (Tensor, np.ndarray)):
        return _joined_rows(outputs, sizes)
    if isinstance(first, (tuple, list)) and not hasattr(first, "_make"):
        return _joined_sequences(outputs, sizes)
    if first is None:
        return None
    container = opened(first)
    if container is None:
        reason = f"a {type(first).__name__} does not have one entry for each sample"
        differs = isinstance(first, _CONSTANTS) and len(outputs) > 1
        raise _NotJoinable(reason + ", and it differs between batches" * differs)
    containers = [opened(each) for each in outputs]
    if any(each is None or list(each.names) != list(container.names) for each in containers):
        raise _NotJoinable("their keys differ")
    columns = zip(*(each.entries for each in containers if each is not None), strict=True)
    entries = [_joined_entry(*named, sizes) for named in zip(container.names, columns, strict=True)]
    return container.rebuild(entries)


def _joined_entry(name: Any, column: Sequence[Any], sizes: Sequence[int]) -> Any:
    if _is_constant(column):
        return column[0]
    try:
        return _joined(column, sizes)
    except _NotJoinable as reason:
        raise _NotJoinable(f"{name!r}: {reason}") from None


def _is_constant(column: Sequence[Any]) -> bool:
    first, kinds = column[0], set(map(type, column))
    return isinstance(first, _CONSTANTS) and len(kinds) == 1 and all(each == first for each in column)


def _joined_rows(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    for each, number in zip(outputs, sizes, strict=True):
        if not each.ndim or each.shape[0] != number:
            shape = tuple(each.shape)
            raise _NotJoinable(
                f"of shape {shape} for {number} samples, it does not have one entry for each sample"
            )
    shapes = list(dict.fromkeys(tuple(each.shape) for each in outputs))
    if len({shape[1:] for shape in shapes}) > 1:
        raise _NotJoinable(
            f"their shapes are {', '.join(map(str, shapes))}, as of outputs that are padded to the longest of"
            " their batch. Pad all to one length, or return a list with a tensor for each sample"
        )
    return torch.cat(list(outputs)) if isinstance(outputs[0], Tensor) else np.concatenate(outputs)


def _joined_sequences(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    columns, reason = None, "their lengths differ"
    if len({len(each) for each in outputs}) == 1:
        try:
            # A list without a tensor may have one text or number for each sample.
            has_tensors = any(isinstance(each, (Tensor, np.ndarray)) for each in first)
            columns = [
                each[0] if has_tensors and _is_constant(each) else _joined(each, sizes)
                for each in zip(*outputs, strict=True)
            ]
        except _NotJoinable as error:
            reason = str(error)
    per_sample = all(len(each) == n for each, n in zip(outputs, sizes, strict=True))
    if columns is None and not per_sample:
        raise _NotJoinable(reason)
    if columns is not None and per_sample and _have_same_type(first):  # ambiguous
        raise _NotJoinable(
            f"a {type(first).__name__} of {len(first)} for {len(first)} samples may have an entry for each"
            " sample, or be columns"
        )
    whole = columns if columns is not None else [*itertools.chain.from_iterable(outputs)]
    return whole if isinstance(first, list) else tuple(whole)


def _have_same_type(entries: Sequence[Any]) -> bool:
    """Return whether the entries may be the same quantity of several samples."""
    kinds = {(type(each), getattr(each, "dtype", None), getattr(each, "ndim", None)) for each in entries}
    return len(kinds) <= 1
