"""Arrays that grow batch by batch, in memory or in files, and are joined to one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


class Arrays:
    """Batches of arrays in the same structure; above a limit they are kept in a temporary directory.

    Args:
        limit: Bytes to hold in memory; None sets no limit.
        padding: The value that fills up shorter rows; None refuses rows of different shapes.
    """

    def __init__(self, limit: int | None, padding: float | None = PADDING) -> None:
        self._limit = limit
        self._padding = padding
        self._held = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._tree: Any = None
        self._leaves: dict[str, _Pieces] = {}  # by their places, in the order of the tree

    def add(self, tree: Any) -> None:
        """Add a batch: arrays in tuples and mappings to any depth.

        Raises:
            ValueError: The batch has other arrays than the ones before.
            DataError: Its rows have another shape, and there is no padding, or none that their dtype can
                hold; or another number of dimensions.
        """
        leaves = dict(_leaves(tree))
        if not self._leaves:
            self._tree, self._leaves = tree, {place: _Pieces() for place in leaves}
        if differing := sorted(leaves.keys() ^ self._leaves.keys()):
            raise ValueError(
                f"the outputs of one batch have {len(leaves)} arrays, those of another {len(self._leaves)};"
                f" not both have {', '.join(map(repr, differing))}. A metric over the whole set needs the"
                " same ones from each"
            )
        for place, leaf in leaves.items():
            pieces = self._leaves[place]
            pieces.check_rows(leaf, self._padding)
            pieces.add(leaf)
            self._held += leaf.nbytes
        if self._limit is not None and self._held > self._limit:
            if self._directory is None:
                self._directory = tempfile.TemporaryDirectory(prefix="drivetrain-evaluation-")
            for number, pieces in enumerate(self._leaves.values()):
                pieces.spill(Path(self._directory.name) / f"{number}.bin")
            self._held = 0

    @property
    def empty(self) -> bool:
        """Whether no batch was added."""
        return not self._leaves

    def joined(self) -> Any:
        """Return the whole arrays in the structure of a batch, shorter rows padded; maps of files above the
        limit.
        """
        directory = None if self._directory is None else Path(self._directory.name)
        every = enumerate(self._leaves.values())
        whole = iter([each.joined(directory, number, self._padding) for number, each in every])
        return _mapped(lambda _: next(whole), self._tree)

    def close(self) -> None:
        """Delete the files."""
        self._leaves = {}
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _leaves(tree: Any, place: str = "") -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the arrays with their places, such as "0/logits"."""
    if isinstance(tree, (Mapping, tuple)):
        for name, each in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(each, f"{place}/{name}" if place else str(name))
    else:
        yield place, tree


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _mapped(function, each) for name, each in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_mapped(function, each) for each in tree)
    return function(tree)


def _can_hold(dtype: np.dtype[Any], number: float) -> bool:
    if dtype.kind in "fc":
        return True
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return number == int(number) and low <= number <= high


class _Pieces:
    """The batches of one array: their shapes and dtypes, and their contents in memory or in a file."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._dtypes: list[Any] = []
        self.dtype: Any = None
        self._held: list[np.ndarray[Any, Any]] = []
        self._file: Path | None = None
        self._spilled = 0  # batches in the file

    def check_rows(self, array: np.ndarray[Any, Any], padding: float | None) -> None:
        first, rows = self.shapes[0][1:] if self.shapes else array.shape[1:], array.shape[1:]
        if rows == first:
            return
        if padding is None:
            reason = "no padding is given to make one array of them"
        elif len(rows) != len(first):
            reason = "padding cannot make one array of them"
        elif not _can_hold(dtype := np.promote_types(self.dtype, array.dtype), padding):
            reason = f"their dtype {dtype} cannot hold the padding {padding:g}"
        else:
            return
        raise DataError(
            f"the rows of one batch have the shape {first}, those of another {rows}, and {reason}"
        )

    def add(self, array: np.ndarray[Any, Any]) -> None:
        self._dtypes.append(array.dtype)
        self.dtype = array.dtype if self.dtype is None else np.promote_types(self.dtype, array.dtype)
        self.shapes.append(array.shape)
        self._held.append(array)

    def spill(self, path: Path) -> None:
        self._file = path
        with path.open("ab") as file:
            for each in self._held:
                file.write(each.tobytes())
        self._spilled += len(self._held)
        self._held = []

    def _each(self) -> Any:
        if self._file is not None:
            with self._file.open("rb") as file:
                for shape, dtype in zip(self.shapes[: self._spilled], self._dtypes, strict=False):
                    content = file.read(math.prod(shape) * dtype.itemsize)
                    yield np.frombuffer(content, dtype).reshape(shape)
        yield from self._held

    def joined(self, directory: Path | None, number: int, padding: float | None) -> np.ndarray[Any, Any]:
        if directory is None and len({shape[1:] for shape in self.shapes}) == 1:
            return np.concatenate(self._held)
        shape = (
            sum(each[0] for each in self.shapes),
            *map(max, zip(*(s[1:] for s in self.shapes), strict=True)),
        )
        whole: np.ndarray[Any, Any]
        if directory is None or self._file is None:
            whole = np.empty(shape, self.dtype)
        else:
            whole = np.memmap(directory / f"{number}.joined", self.dtype, "w+", shape=shape)
        row = 0
        for each in self._each():
            rows = whole[row : row + len(each)]
            if rows.shape != each.shape:
                rows[...] = padding
            rows[tuple(map(slice, each.shape))] = each
            row += len(each)
        return whole
