"""What the plain attributes of a task's modules hold, which torch's state dict leaves out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from drivetrain.core.random_streams import generator_state, load_generator_state

_MANY = 1000
"""The number of elements of a container to look at."""

_DEPTH = 4
"""The levels of containers and objects in an attribute to look at."""

_LIBRARIES = frozenset(
    {"abc", "builtins", "collections", "deepspeed", "drivetrain", "torch", "torch_xla", "torchao", "typing"}
)
"""Packages whose classes rebuild or save their attributes without the user's help."""

_opaque = set(_LIBRARIES)
"""Packages whose objects in attributes are not searched: they are no modules, and belong to a library."""

_OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_hparams"})
"""Attributes that torch and this package store in modules of any class."""

PLAIN = (int, float, str, bytes, type(None))

RandomGenerator: TypeAlias = "torch.Generator | random.Random | np.random.Generator | np.random.RandomState"

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def never_search(*packages: str) -> None:
    """Leave out objects of these packages' classes that are no modules; integrations call it when imported.

    Such objects are configurations, or lead to a whole trainer of theirs.
    """
    _opaque.update(packages)


def modules_of(
    module: nn.Module, prefix: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield modules with the prefix of their attributes' names, except metrics, which store themselves."""
    seen = set() if seen is None else seen
    if module in seen or _is_metric(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from modules_of(child, f"{prefix}{name}.", seen)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module of the user's class that are no numbers or texts."""
    if not _is_of_library(type(module)):  # type: ignore[arg-type]  # mypy: no class of modules is hashable
        yield from _added_to(module)


def _added_to(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name not in _OF_MODULES and not isinstance(value, PLAIN):
            yield name, value


def leaves(value: Any, kinds: tuple[type, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the objects of some classes in an attribute's value, each with its place."""
    seen: set[int] = set()

    def search(place: tuple[Any, ...], each: Any, depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
        if isinstance(each, kinds):
            yield place, each
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
        elif not isinstance(each, type) and type(each).__module__.partition(".")[0] not in _opaque:
            items = getattr(each, "__dict__", {}).items()
        for key, inner in islice(items, _MANY):
            yield from search((*place, key), inner, depth - 1)

    return islice(search((), value, _DEPTH), _MANY)


def generators_of(task: nn.Module) -> dict[str, RandomGenerator]:
    """Return the random generators in attributes of a task and its modules, by name."""
    found: dict[str, RandomGenerator] = {}
    seen: set[int] = set()
    for prefix, module in modules_of(task):
        for name, value in _added_to(module):  # of torch's modules too: the user may have put one there
            for place, each in leaves(value, GENERATORS):
                if id(each) not in seen and not isinstance(each, random.SystemRandom):
                    seen.add(id(each))
                    found[".".join(map(str, (prefix + name, *place)))] = each
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


@cache
def _is_of_library(kind: type) -> bool:
    return {each.__module__.partition(".")[0] for each in kind.__mro__} <= _LIBRARIES


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))
