"""Splits batches by samples, and joins the outputs of batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
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


def join_batches(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the outputs of batches as one output of all samples.

    Tensors and arrays are concatenated. A list has an entry for each sample; mappings, tuples and data
    classes are joined entry by entry.

    Raises:
        DataError: There is no output, or a part of one has no entry for each sample; names it.
    """
    if not outputs:
        raise DataError("the data gave no batch, so there are no outputs to join. joined=False returns []")
    return _joined(outputs, sizes, "the output")


def _joined(outputs: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    first, kinds = outputs[0], {*map(type, outputs)}
    if len(kinds) > 1:
        raise _not_joinable(path, f"is of kinds {', '.join(sorted(each.__name__ for each in kinds))}")
    if first is None:
        return None
    if isinstance(first, (Tensor, np.ndarray, list)):
        return _concatenated(outputs, sizes, path)
    containers = [container for each in outputs if (container := opened(each)) is not None]
    if not containers:
        raise _not_joinable(path, f"is a {type(first).__name__}")
    names = list(containers[0].names)
    if any(list(each.names) != names for each in containers):
        raise _not_joinable(path, "has other keys in other batches")
    columns = zip(names, *(each.entries for each in containers), strict=True)
    return containers[0].rebuild([_joined(column, sizes, f"{path}[{name!r}]") for name, *column in columns])


def _concatenated(outputs: Sequence[Any], sizes: Sequence[int], path: str) -> Any:
    shapes = [(len(each),) if isinstance(each, list) else tuple(each.shape) for each in outputs]
    for shape, number in zip(shapes, sizes, strict=True):
        if shape[:1] != (number,):
            kind = type(outputs[0]).__name__
            raise _not_joinable(path, f"of {number} samples is a {kind} of shape {shape}")
    if isinstance(outputs[0], list):
        return [*itertools.chain.from_iterable(outputs)]
    if len({shape[1:] for shape in shapes}) > 1:
        listed = ", ".join(map(str, dict.fromkeys(shapes)))
        raise _not_joinable(
            path,
            f"has the shapes {listed}, as if padded to the longest of each batch. Pad all to one length, or"
            " return a list with a tensor for each sample",
        )
    return torch.cat(list(outputs)) if isinstance(outputs[0], Tensor) else np.concatenate(outputs)


def _not_joinable(path: str, what: str) -> DataError:
    return DataError(
        f"joined=True cannot join the outputs: {path} {what}. Tensors, arrays and lists need one entry for"
        " each sample, and may be in mappings, tuples and data classes; without joined, predict returns a"
        " list with the outputs of each batch"
    )
