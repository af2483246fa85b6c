"""Running the user's code for our own purposes, so that nothing of it stays."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.core.random_streams import generator_state, load_generator_state, preserved
from drivetrain.task.attributes import GENERATORS, PLAIN, leaves

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)

_SEARCHED, _OF_DATA = 1000, 100
"""The numbers of elements of a container to look into: of the task, and of data, which may have many."""


@contextmanager
def without_trace(*owners: Any, device: torch.device | None = None) -> Iterator[None]:
    """Run the block, which calls the user's code for our own purposes, and restore what it has changed.

    Restored are the generators of the process, and of the owners: generators, plain attributes with the
    containers in them, modes, hooks, gradients, `requires_grad`, buffers and other tensors. The values of
    parameters are not copied: a block that trains works on a copy of the task. Of data, objects are restored
    and the values of tensors are not.

    Args:
        *owners: The task, and the data that the block reads.
        device: The model's device, whose generator is restored too.
    """
    kept = _Kept()
    for each in owners:
        kept.keep(each)
    with preserved(device):
        try:
            yield
        finally:
            kept.restore()


class _Kept:
    """The state of some objects, and how to restore it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._seen: dict[int, object] = {}  # with the objects, so that no other gets the same id

    def restore(self) -> None:
        for each in reversed(self._undo):
            each()

    def keep(self, owner: Any) -> None:
        has_values, waiting, whole = isinstance(owner, nn.Module), [owner], {id(owner)}
        most = _SEARCHED if has_values else _OF_DATA
        while waiting:
            each = waiting.pop()
            if id(each) in self._seen or isinstance(each, PLAIN):
                continue
            self._seen[id(each)] = each
            if isinstance(each, (Tensor, np.ndarray)):
                if has_values:
                    self._keep_values(each)
            elif isinstance(each, tuple) or type(each) in _CONTAINERS:
                waiting += self._kept_elements(each, most)
            elif isinstance(each, nn.Module):
                table = vars(each).get("_parameters")
                self._seen[id(table)] = table  # some strategies replace its tensors in a forward
                waiting += [vars(each), *each.parameters(recurse=False), *each.buffers(recurse=False)]
            elif isinstance(each, DataLoader):
                whole |= {id(part) for part in (each.dataset, each.sampler, each.batch_sampler)}
                waiting += [each.dataset, each.sampler, each.batch_sampler, each.generator]
            elif isinstance(each, (Dataset, Sampler)) or id(each) in whole:
                waiting.append(getattr(each, "__dict__", None))
            else:
                for _, generator in leaves(each, GENERATORS):
                    self._keep_generator(generator)

    def _kept_elements(self, container: Any, most: int) -> list[Any]:
        """Note the elements of a container, and return those to look into."""
        if not isinstance(container, tuple):
            self._undo.append(partial(_refill, container, container.copy()))
        return [*islice(container.values() if isinstance(container, dict) else container, most)]

    def _keep_generator(self, generator: Any) -> None:
        if not isinstance(generator, random.SystemRandom):
            self._undo.append(partial(load_generator_state, generator, generator_state(generator)))

    def _keep_values(self, array: Any) -> None:
        if isinstance(array, nn.Parameter):
            gradient = array.grad
            self._undo.append(partial(setattr, array, "grad", gradient))
            self._undo.append(partial(setattr, array, "requires_grad", array.requires_grad))
            if type(gradient) is Tensor:
                self._keep_values(gradient)
        elif isinstance(array, np.ndarray):
            self._undo.append(partial(_rewrite, array, array.copy()))
        elif type(array) is Tensor and array.layout is torch.strided and not array.is_meta:
            self._undo.append(partial(_overwrite, array, array.detach().clone()))


def _refill(container: Any, before: Any) -> None:
    if len(container) == len(before) and _same(container, before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _same(container: Any, before: Any) -> bool:
    if isinstance(before, dict):
        return all(key in container and container[key] is each for key, each in before.items())
    if isinstance(before, set):
        return container == before  # type: ignore[no-any-return]
    return all(one is other for one, other in zip(container, before, strict=True))


def _rewrite(array: Any, before: Any) -> None:
    if array.shape == before.shape and array.tobytes() != before.tobytes():
        array[...] = before


def _overwrite(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:
        tensor.data = before
    elif not torch.equal(tensor, before):  # a tensor in read-only memory must not be written to
        tensor.data.copy_(before)  # `data` hides it from autograd
