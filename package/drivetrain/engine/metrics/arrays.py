"""Batches of arrays on the host, joined to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_structure, tree_unflatten

from drivetrain.core.errors import DataError

PADDING = -100
"""The value that fills up shorter rows; losses and metrics leave it out."""


def as_arrays(value: Any) -> Any:
    """Return tensors, in tuples, lists and mappings to any depth, as NumPy arrays with a first dimension."""
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
        is_unknown = tensor.dtype is torch.bfloat16 or (tensor.is_floating_point() and tensor.itemsize == 1)
        array = (tensor.float() if is_unknown else tensor).numpy(force=True)
        return array if array.ndim else array.reshape(1)
    if isinstance(value, Mapping):
        return {name: as_arrays(each) for name, each in value.items()}
    return tuple(as_arrays(each) for each in value) if isinstance(value, (tuple, list)) else value


def joined(batches: Sequence[Any], padding: float | None = PADDING) -> Any:
    """Join batches of arrays, in tuples and mappings to any depth, to one of the same structure.

    Args:
        padding: The value that fills up shorter rows; None refuses rows of different shapes.
    """
    flat = [{keystr(path): leaf for path, leaf in tree_leaves_with_path(each)} for each in batches]
    for leaves in flat:
        if differing := sorted(leaves.keys() ^ flat[0].keys()):
            raise ValueError(
                f"the outputs of one batch have {len(leaves)} arrays, those of another {len(flat[0])};"
                f" not both have {', '.join(differing)}. A metric over the whole set needs the same arrays"
                " from each batch"
            )
    whole = [_join([leaves[path] for leaves in flat], padding) for path in flat[0]]
    return tree_unflatten(whole, tree_structure(batches[0]))


def _can_hold(dtype: np.dtype[Any], number: float) -> bool:
    if dtype.kind in "fc":
        return True
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return number == int(number) and low <= number <= high


def _join(pieces: Sequence[np.ndarray[Any, Any]], padding: float | None) -> np.ndarray[Any, Any]:
    """Concatenate arrays; shorter rows are padded."""
    first = pieces[0].shape[1:]
    other = next((each.shape[1:] for each in pieces if each.shape[1:] != first), None)
    if other is None:
        return np.concatenate(pieces)
    dtype = np.result_type(*{each.dtype for each in pieces})
    reason = ""
    if padding is None:
        reason = "no padding is given to make one array of them"
    elif any(each.ndim != pieces[0].ndim for each in pieces):
        reason = "padding cannot make one array of them"
    elif not _can_hold(dtype, padding):
        reason = f"their dtype {dtype} cannot hold the padding {padding:g}"
    if reason:
        raise DataError(f"the rows of one batch have shape {first}, of another {other}, and {reason}")
    rows = map(max, zip(*(each.shape[1:] for each in pieces), strict=True))
    whole = np.full((sum(map(len, pieces)), *rows), padding, dtype)
    row = 0
    for each in pieces:
        whole[row : row + len(each)][tuple(map(slice, each.shape))] = each
        row += len(each)
    return whole
