"""The modules of a task, and what is in their plain attributes, which torch's state dict leaves out."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from drivetrain.core.random_streams import generator_state, load_generator_state

_MANY = 1000
"""The number of elements of a container to look at."""

_DEPTH = 4
"""The levels of containers and objects in an attribute to look at."""

_skipped = {"deepspeed", "drivetrain", "torch_xla", "torchao"}
"""Packages whose objects in attributes are neither searched nor stored, modules too."""

_OPAQUE = {"torch", *sys.stdlib_module_names}
"""Packages whose objects in attributes are not searched for generators."""

_SEARCHED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, types.SimpleNamespace)
_NOT_SEARCHED = (DataLoader, Dataset, Sampler)
"""Classes that are searched, and that are not, whatever their package; data goes on by its own state."""

CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, type, partial)
"""Classes of attributes' values that are no state."""

OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_hparams", "hparams"})
"""Attributes that torch and this package store in modules of any class."""

PLAIN = (int, float, str, bytes, type(None))

RandomGenerator: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def never_search(*packages: str) -> None:
    """Leave out objects of these packages' classes that are no modules; integrations call it when imported.

    Such objects are configurations, or lead to a whole trainer of theirs.
    """
    _skipped.update(packages)


def modules_of(task: nn.Module, besides: Iterable[Any] = ()) -> Iterator[tuple[str, Any]]:
    """Yield a task's modules, those in its attributes too, with the prefix of their attributes' names.

    Args:
        besides: Modules that are left out, and with them modules that contain no others.
    """
    left_out, seen = {id(each) for each in besides}, set[int]()

    def search(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        children = [*module.named_children()]
        is_left_out = children and all(id(each) in left_out for _, each in children)
        if id(module) in seen or id(module) in left_out or is_left_out:
            return
        seen.add(id(module))
        yield prefix, module
        for name, value in vars(module).items():
            if name not in OF_MODULES and not isinstance(value, PLAIN):
                found = leaves(value, (nn.Module,))
                children += [(".".join(map(str, (name, *path))), each) for path, each in found]
        for name, child in children:
            yield from search(child, f"{prefix}{name}.")

    yield from search(task, "")


def is_skipped(value: Any) -> bool:
    """Return whether an object is neither searched nor stored: code, data, or an object of a library."""
    package = type(value).__module__.partition(".")[0]
    return isinstance(value, (*CODE, torch.device, torch.dtype, *_NOT_SEARCHED)) or package in _skipped


def is_opaque(value: Any) -> bool:
    """Return whether an object is not searched."""
    if is_skipped(value) or _is_metric(value):
        return True
    package = type(value).__module__.partition(".")[0]
    return package in _OPAQUE and not isinstance(value, (nn.Module, *_SEARCHED))


def leaves(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the objects of some classes in an attribute's value, each with its path."""
    seen: set[int] = set()

    def search(path: tuple[Any, ...], each: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
        if isinstance(each, kinds):
            yield path, each
            return
        if depth == 0 or id(each) in seen or isinstance(each, PLAIN):
            return
        seen.add(id(each))
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(each, nn.Module):  # in a container, where torch does not look for modules
            items = () if _is_metric(each) else chain(each.named_parameters(), each.named_buffers())
        elif isinstance(each, dict):
            items = each.items()
        elif isinstance(each, (list, tuple, deque)):
            items = enumerate(each)
        elif not is_opaque(each):
            items = getattr(each, "__dict__", {}).items()
        for key, inner in islice(items, _MANY):
            yield from search((*path, key), inner, depth - 1)

    return islice(search((), value, _DEPTH), _MANY)


def generators_of(task: nn.Module) -> dict[str, RandomGenerator]:
    """Return the random generators in attributes of a task and its modules, by name."""
    found: dict[str, RandomGenerator] = {}
    seen: set[int] = set()
    for prefix, module in modules_of(task):
        for name, value in vars(module).items():  # of torch's modules too: the user may have put one there
            for path, each in leaves(value, GENERATORS) if name not in OF_MODULES else ():
                if id(each) not in seen and not isinstance(each, random.SystemRandom):
                    seen.add(id(each))
                    found[".".join(map(str, (prefix + name, *path)))] = each
    return found


@contextmanager
def generators_kept(task: nn.Module) -> Iterator[None]:
    """Run the block with the task's random generators restored at its end, as a validation within a fit does.

    So neither the number of validations nor the one at the end of a stopped run moves the training's draws.
    """
    states = [(each, generator_state(each)) for each in generators_of(task).values()]
    try:
        yield
    finally:
        for generator, state in states:
            load_generator_state(generator, state)


def _is_metric(value: Any) -> bool:
    # Of the class: a module looks for an attribute that it lacks in all of its tables.
    return all(callable(getattr(type(value), name, None)) for name in ("update", "compute", "reset"))
