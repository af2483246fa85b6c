"""Trees of values as the JSON and the tensors of a checkpoint, by `distributed.tree`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.format.tensors import check_tensor
from drivetrain.checkpoint.storage.filesystem import DamagedCheckpointError
from drivetrain.core.errors import CheckpointError, DrivetrainError
from drivetrain.core.types import Json
from drivetrain.distributed import tree


def pack(value: Any) -> tuple[Json, dict[str, Tensor]]:
    """Return a tree as JSON and tensors that a checkpoint can store; see `distributed.tree.pack`.

    Raises:
        CheckpointError: A value cannot be stored; names its path and the allowed types.
    """
    return tree.pack(value, check_tensor)


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the tree from the result of `pack`; see `distributed.tree.unpack`.

    Raises:
        DamagedCheckpointError: The JSON is not a result of `pack`.
    """
    try:
        return tree.unpack(value, tensors)
    except tree.MalformedError as error:
        raise DamagedCheckpointError(str(error)) from error


@contextmanager
def well_formed(what: str) -> Iterator[None]:
    """Run the block, which loads a file's content, with its errors turned into one of ours."""
    try:
        yield
    except DrivetrainError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{what} could not be loaded: {type(error).__name__}: {error}. It has another structure than the"
            " saved one, or the code that loads it is wrong"
        ) from error
