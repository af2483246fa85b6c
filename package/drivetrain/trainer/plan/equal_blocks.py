"""Equal blocks of a model, of which a forward without values runs a few and counts the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils._pytree import tree_flatten as flatten_all

from drivetrain.engine.memory_profile import MemoryWatch, Snapshot

_LEAST = 6
"""The fewest equal blocks in a row of which some are left out."""


@dataclass
class _RowCall:
    """One call of a row of blocks: the memory of the second, the third, and of each that was left out."""

    second: Snapshot
    third: Snapshot
    left_out: list[Snapshot] = field(default_factory=list)


class EqualBlocks:
    """Leaves out all of a row of equal blocks but the first three and the last.

    A block that is left out returns outputs like the third's, and counts as much memory as what is left of
    the second. It is run as any other if it is called with other inputs than the third, or if the third kept
    another amount than the second. What a block changes besides its outputs, such as a cache, is left out
    too.
    """

    def __init__(self, model: nn.Module, watch: MemoryWatch) -> None:
        self._watch = watch
        self._calls: list[_RowCall] = []
        for row in _rows(model):
            known: dict[str, Any] = {}
            _, second, third, *between, _ = row
            for block, call in ((second, self._second), (third, self._third)):
                vars(block)["forward"] = functools.partial(call, known, block.forward)
            for block in between:
                vars(block)["forward"] = functools.partial(self._between, known, block, block.forward)

    def size(self) -> int:
        """Return the bytes that the blocks left out would hold now, less those that they do."""
        held, size = self._watch.still_held, 0
        for each in self._calls:
            if each.left_out:
                # The third's output is what the fourth would have kept, as the third kept the second's.
                size += held(each.second) * (len(each.left_out) + 1) - held(each.third)
                size -= sum(map(held, each.left_out))
        return size

    def _measured(self, call: Callable[[], Any]) -> tuple[Any, Snapshot]:
        before = self._watch.snapshot()
        outputs = call()
        return outputs, {
            key: each for key, each in self._watch.snapshot().items() if before.get(key) is not each
        }

    def _second(self, known: dict[str, Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outputs, memory = self._measured(lambda: forward(*args, **kwargs))
        known.clear()
        known["second"] = memory
        return outputs

    def _third(self, known: dict[str, Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        second = known.pop("second", None)
        outputs, memory = self._measured(lambda: forward(*args, **kwargs))
        if second is not None and self._watch.still_held(second) == self._watch.still_held(memory):
            known |= {"inputs": _described((args, kwargs)), "outputs": _like(outputs, (args, kwargs))}
            known["pass"] = _RowCall(second, memory)
            self._calls.append(known["pass"])
        return outputs

    def _between(
        self, known: dict[str, Any], block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if known.get("inputs") != _described((args, kwargs)):
            return forward(*args, **kwargs)
        parameter = next(block.parameters(), None)
        outputs, memory = self._measured(lambda: known["outputs"]((args, kwargs), parameter))
        known["pass"].left_out.append(memory)
        return outputs


class LeftOut(Exception):  # noqa: N818  no error
    """A backward has come to a block that was left out."""


class _Outputs(torch.autograd.Function):
    """New tensors that depend on the inputs, whose graph therefore stays."""

    @staticmethod
    def forward(ctx: Any, made: list[Any], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        outputs = [torch.empty_strided(*each, **options) for each, options, _ in made]
        pairs = zip(outputs, made, strict=True)
        ctx.mark_non_differentiable(*(each for each, (*_, has_gradient) in pairs if not has_gradient))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise LeftOut


def _like(outputs: Any, inputs: Any) -> Callable[[Any, Any], Any]:
    """Return a function of other inputs, and of a parameter, that makes outputs of the same kind."""
    leaves, structure = _flat(outputs)
    given = {id(each): number for number, each in enumerate(_flat(inputs)[0])}
    # An output that is one of the inputs stays one; any other object is the same for all blocks.
    passed = [given.get(id(each)) for each in leaves]
    is_made = [isinstance(each, Tensor) and place is None for each, place in zip(leaves, passed, strict=True)]
    made = [
        ((each.shape, each.stride()), {"dtype": each.dtype, "device": each.device}, each.requires_grad)
        for each, new in zip(leaves, is_made, strict=True)
        if new
    ]
    others = [None if isinstance(each, Tensor) else each for each in leaves]
    del leaves, outputs, inputs

    def make(inputs: Any, parameter: Tensor | None) -> Any:
        flat = _flat(inputs)[0]
        tensors = [each for each in flat if isinstance(each, Tensor)]
        new = iter(_Outputs.apply(made, *tensors, parameter))  # type: ignore[no-untyped-call]
        found = [
            next(new) if is_new else other if place is None else flat[place]
            for is_new, place, other in zip(is_made, passed, others, strict=True)
        ]
        return tree_unflatten(found, structure)

    return make


def _flat(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten tuples, lists and mappings; any other object, such as a cache of keys and values, is a leaf."""
    return flatten_all(tree, is_leaf=lambda each: not isinstance(each, (tuple, list, dict)))


def _described(inputs: Any) -> Any:
    """Return what must be equal for two calls to make outputs of the same kind."""
    leaves, structure = _flat(inputs)
    return structure, [
        (each.shape, each.stride(), each.dtype, each.requires_grad)
        if isinstance(each, Tensor)
        else each
        if isinstance(each, (bool, int, float, str))
        else id(each)
        for each in leaves
    ]


def _rows(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the long rows of neighbours with equal parameters and settings, none inside another row."""
    inside: set[int] = set()
    for container in model.modules():
        if id(container) in inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
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
        for row in rows:
            is_one = len({id(each) for each in row}) == len(row) >= _LEAST
            if is_one and any(True for _ in row[0].parameters()):
                inside.update(id(each) for block in row for each in block.modules())
                yield row


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
