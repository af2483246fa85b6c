"""Rows of equal blocks in a model: of a long one, a step without values runs a few and counts the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from drivetrain.core.messages import logger

_LOG = logger(__name__)
_MARK = "_drivetrain_equal_block"
_FEWEST = 2
"""The blocks of a row in the smallest model: the first, whose inputs may need no gradient, and another."""
_LEAST = 10
"""A row with fewer blocks is run whole: the three small models together have nine."""


class StepMemory(NamedTuple):
    """The memory of one micro-batch, in bytes.

    Attributes:
        activations: What its forward keeps for backward, the batch, and a block's activations while it is
            recomputed.
        temporary: What is there besides at the peak: the model's outputs, such as logits, and the gradients
            of activations.
    """

    activations: int
    temporary: int


class LeftOut(Exception):  # noqa: N818  no error
    """A backward has come to the blocks that were left out; the peak comes before."""


class _End(torch.autograd.Function):
    """Tensors as they are, at which a backward ends."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LeftOut


class _BlockPlace(NamedTuple):
    """The number of a block's row in the model, and the block's in the row."""

    row: int
    block: int


def memory_by_few_blocks(
    model: nn.Module, copy: Callable[[nn.Module], nn.Module], measure: Callable[[nn.Module], StepMemory]
) -> StepMemory:
    """Return what `measure` returns of a model, from copies in which long rows of equal blocks are shorter.

    Each further block must add as much as the one before, and change nothing else. Where that does not hold,
    and where the model does not run with fewer blocks, the whole model is measured.

    Args:
        model: The model, without values; its blocks get an attribute.
        copy: Copies it.
        measure: Runs a step of a copy.
    """
    whole = _marked(model)
    if whole:
        few = copy(model)
        _shorten(few, [_FEWEST + 2] * len(whole))
        try:
            return _extended(few, copy, measure, whole)
        except Exception as error:  # such as of a step that numbers its blocks
            _LOG.debug("the model is measured whole: %s", error)
    _shorten(model, whole)
    return measure(model)


def _extended(
    model: nn.Module,
    copy: Callable[[nn.Module], nn.Module],
    measure: Callable[[nn.Module], StepMemory],
    whole: Sequence[int],
) -> StepMemory:
    def measured(row: int, more: int) -> StepMemory:
        few = copy(model)
        _shorten(few, [_FEWEST + more * (each == row) for each in range(len(whole))])
        return measure(few)

    found = measured(0, 0)
    activations = found.activations
    for row, length in enumerate(whole):
        one, two = measured(row, 1), measured(row, 2)
        growth = one.activations - found.activations
        if two != StepMemory(one.activations + growth, one.temporary) or one.temporary != found.temporary:
            raise ValueError("equal blocks take different amounts")
        activations += (length - _FEWEST) * growth
    return StepMemory(activations, found.temporary)


def _shorten(model: nn.Module, lengths: Sequence[int]) -> None:
    """Leave the first blocks of each row in their container; a backward ends at the last of them."""
    for container in [each for each in model.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]:
        for place in reversed(range(len(container))):
            mark = vars(container[place]).get(_MARK)
            if mark is not None and mark.block >= lengths[mark.row]:
                del container[place]
            elif mark is not None and mark.block == lengths[mark.row] - 1:
                container[place].register_forward_pre_hook(_ending, with_kwargs=True)


def _ending(_: nn.Module, *inputs: Any) -> Any:
    return tree_map_only(Tensor, _ended, inputs)


def _ended(tensor: Tensor) -> Any:
    return _End.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


def _marked(model: nn.Module) -> list[int]:
    """Mark the blocks of long rows, none inside another row, and return the length of each row."""
    inside: set[int] = set()
    lengths: list[int] = []
    for container in model.modules():
        if id(container) in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for row in _rows(container):
            is_one = len({id(each) for each in row}) == len(row) >= _LEAST
            if is_one and any(True for _ in row[0].parameters()):
                inside.update(id(each) for block in row for each in block.modules())
                for number, block in enumerate(row):
                    vars(block)[_MARK] = _BlockPlace(len(lengths), number)
                lengths.append(len(row))
    return lengths


def _rows(container: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Divide a container's blocks into rows of neighbours with equal parameters and settings."""
    rows: list[list[nn.Module]] = []
    numbers: list[int] = []
    kind: Hashable = None
    for block in container:
        of_this = _kind(block)
        counted = _numbers(block)
        steps = {after - before for before, after in zip(numbers, counted, strict=False)}
        if rows and of_this == kind and len(numbers) == len(counted) and steps <= {0, 1}:
            rows[-1].append(block)
        else:
            rows.append([block])
        kind, numbers = of_this, counted
    return rows


def _kind(block: nn.Module) -> Hashable:
    """Return a value that is equal for blocks with equal parameters and settings, but for whole numbers."""
    settings = tuple((name, type(each), _settings(each)) for name, each in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    return settings, tuple((name, each.shape, each.dtype, each.requires_grad) for name, each in tensors)


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    kinds = (bool, float, str, type(None))
    return tuple((name, each) for name, each in vars(module).items() if isinstance(each, kinds))


def _numbers(block: nn.Module) -> list[int]:
    """Return a block's whole numbers; neighbours may differ by one, which is then the block's own number."""
    return [each for module in block.modules() for each in vars(module).values() if type(each) is int]
