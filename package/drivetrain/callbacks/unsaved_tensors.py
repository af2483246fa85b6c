"""Tensors on a task's modules that training changes and no checkpoint holds."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.messages import logger

_LOG = logger(__name__)

WARNING = "training changes tensors that no checkpoint holds"
"""The beginning of the warning."""

_MANY = 1000
"""The number of elements of a container to check."""

_LIBRARIES = frozenset(
    {"abc", "builtins", "collections", "deepspeed", "drivetrain", "torch", "torch_xla", "torchao", "typing"}
)
"""Packages whose classes rebuild or save their attributes without the user's help."""

_OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_hparams"})
"""Attributes that torch and this package store in modules of any class."""

_Mark = tuple[weakref.ref[Tensor], int, tuple[int, ...]]


class UnsavedTensors:
    """Finds tensors that change between the first update and a save, and that the checkpoint does not hold.

    It checks a module's plain attributes, and the elements of a list, deque, tuple or dict. A tensor that the
    first update makes or moves, and that then stays the same, is a cache. Only weak references and version
    counters are kept. No value is read, so there is no wait for the device.

    Args:
        task: The task, after the first update of this program.
    """

    def __init__(self, task: nn.Module) -> None:
        self._marks = {name: _marks(value) for name, value in _attributes(task)}
        self._known: set[str] = set()

    def warn(self, task: nn.Module, saved: Collection[str]) -> None:
        """Warn of tensors that have changed since the last call, once for each name.

        Args:
            task: The task.
            saved: Names of the tensors that the checkpoint holds.
        """
        before, now = self._marks, dict(_attributes(task))
        self._marks = {name: _marks(value) for name, value in now.items()}
        changed = [
            name
            for name, marks in self._marks.items()
            if name not in saved
            and name not in self._known
            and _differs(before.get(name, {}), marks, now[name])
        ]
        if changed:
            held = _storages([*task.parameters(), *task.buffers()])
            changed = [name for name in changed if not _storages(_tensors(now[name]).values()) & held]
        if not changed:
            return
        self._known.update(changed)
        _LOG.warning(
            f"{WARNING}: {', '.join(map(repr, changed))} of {type(task).__name__}, neither parameters nor"
            " buffers. A resumed run is not exact if a step reads what an earlier step has left there."
            " Register the tensor as a buffer (register_buffer), return it from get_extra_state of its"
            " module, or keep it in a callback that has state_dict. 'drivetrain check-resume' finds out"
            " whether a step depends on it"
        )


def _attributes(task: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes with tensors, by full name."""
    for prefix, module in _modules(task, "", set()):
        if _is_of_library(type(module)):  # type: ignore[arg-type]  # mypy: no class of modules is hashable
            continue
        for name, value in vars(module).items():
            if name in _OF_MODULES or not _tensors(value):
                continue
            # torch's weight_norm, spectral_norm and pruning compute the tensor in each forward.
            computed = f"{name}_g" in module._parameters or f"{name}_orig" in module._parameters
            if not computed:
                yield clean_name(prefix + name), value


@cache
def _is_of_library(kind: type) -> bool:
    return {each.__module__.partition(".")[0] for each in kind.__mro__} <= _LIBRARIES


def _modules(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with the prefix of their attributes' names, except those that save their contents."""
    is_metric = all(callable(getattr(module, name, None)) for name in ("update", "compute", "reset"))
    saves_itself = type(module).get_extra_state is not nn.Module.get_extra_state
    if module in seen or is_metric or saves_itself:
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from _modules(child, f"{prefix}{name}.", seen)


def _tensors(value: Any) -> dict[Any, Tensor]:
    """Return the tensors in an attribute's value that are not parameters, by key or position."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        items = ((None, value),)
    elif isinstance(value, dict):
        items = islice(value.items(), _MANY)
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(islice(value, _MANY))
    return {
        key: each for key, each in items if isinstance(each, Tensor) and not isinstance(each, nn.Parameter)
    }


def _marks(value: Any) -> dict[Any, _Mark]:
    return {
        key: (weakref.ref(each), -1 if each.is_inference() else each._version, tuple(each.shape))
        for key, each in _tensors(value).items()
    }


def _differs(before: Mapping[Any, _Mark], now: Mapping[Any, _Mark], value: Any) -> bool:
    """Return whether a tensor was changed or replaced, or a list of tensors has grown."""
    grows = isinstance(value, (list, deque)) and len(now) > len(before) > 0
    return grows or any(
        key in before and (before[key][0]() is not mark[0]() or before[key][1:] != mark[1:])
        for key, mark in now.items()
    )


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the memory addresses of tensors that have memory."""
    found = set()
    for each in tensors:
        try:
            found.add(each.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, sharded or not made yet
            continue
    return found - {0}
