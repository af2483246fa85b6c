"""Tensors that training changes and no checkpoint holds."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.weights.module_state import clean_name, is_extra
from drivetrain.core.messages import logger

_LOG = logger(__name__)

WARNING = "training changes tensors that no checkpoint holds"
"""The beginning of the warning."""

_MANY = 1000
"""The number of elements of a container to check."""

_DEPTH = 4
"""The levels of containers and objects in an attribute to check."""

_LIBRARIES = frozenset(
    {"abc", "builtins", "collections", "deepspeed", "drivetrain", "torch", "torch_xla", "torchao", "typing"}
)
"""Packages whose classes rebuild or save their attributes without the user's help."""

_OPAQUE = _LIBRARIES | {"lightning", "pytorch_lightning", "peft", "transformers", "torchmetrics"}
"""Packages whose objects in attributes are not searched: they are no modules, and belong to a library."""

_OF_MODULES = frozenset({*vars(nn.Module()), "_flat_weights", "_hparams"})
"""Attributes that torch and this package store in modules of any class."""

_PLAIN = (int, float, str, bytes, type(None))

_Mark = tuple[Callable[[], Tensor | None], int, tuple[int, ...]]


class UnsavedTensors:
    """Finds tensors that change between the first update and a save, and that the checkpoint does not hold.

    It checks buffers with `persistent=False`, trained parameters that the state dict leaves out, and a
    module's plain attributes, with what is in their containers and in objects of the user's classes. A tensor
    that the first update makes or moves, and that then stays the same, is a cache. Of most, weak references
    and version counters are kept, so there is no wait for the device. Buffers are compared by checksums,
    because strategies write to them without changing them.

    Args:
        task: The task, after the first update of this program.
    """

    def __init__(self, task: nn.Module) -> None:
        self._marks = {name: _marks(each) for name, each in _candidates(task)}
        self._known: set[str] = set()

    def warn(self, task: nn.Module, saved: Snapshot) -> None:
        """Warn of tensors that have changed since the last call, once for each name.

        Args:
            task: The task.
            saved: What the checkpoint holds.
        """
        weights = saved.tensors["model"]
        skipped = self._known | weights.keys()
        before, now = self._marks, {name: each for name, each in _candidates(task) if name not in skipped}
        self._marks = {name: _marks(each) for name, each in now.items()}
        changed = [
            name
            for name, marks in self._marks.items()
            if _differs(before.get(name, {}), marks, now[name].grows)
        ]
        if changed:
            # A frozen parameter that a checkpoint leaves out does not change.
            held = _storages(
                each
                for name, each in chain(task.named_parameters(), task.named_buffers())
                if clean_name(name) in weights or (isinstance(each, nn.Parameter) and not each.requires_grad)
            )
            extras = _Extras(saved)
            changed = [
                name
                for name in changed
                if not _storages(now[name].tensors.values()) & held
                and not extras.hold(name, now[name].tensors.values())
            ]
        trained = (clean_name(name) for name, each in task.named_parameters() if each.requires_grad)
        lacking = [name for name in trained if name not in skipped]
        if lacking:  # some strategies store other names than the state dict's
            state = {*map(clean_name, task.state_dict())}
            changed += [name for name in lacking if name not in state]
        if not changed:
            return
        self._known.update(changed)
        _LOG.warning(
            f"{WARNING}: {', '.join(map(repr, changed))} of {type(task).__name__}. A resumed run is not exact"
            " if a step reads what an earlier step has left there. Register the tensor as a buffer"
            " (register_buffer, without persistent=False), return it from get_extra_state of its module, or"
            " keep it in a callback that has state_dict. 'drivetrain check-resume' finds out whether a step"
            " depends on it"
        )


class _Extras:
    """What a checkpoint holds beside weights: extra states of modules, and states of callbacks.

    Args:
        saved: What it holds.
    """

    def __init__(self, saved: Snapshot) -> None:
        weights, state = saved.tensors["model"], saved.tensors["state"]
        self._tensors = [*state.values(), *(each for name, each in weights.items() if is_extra(name))]
        tree: Any = saved.objects["state"]
        self._values = [tree.get("module_extras"), tree.get("callbacks")]
        # Modules that store bytes of their own format, which may hold any of their attributes.
        extras = tree.get("module_extras") or {}
        opaque = [name for name, value in extras.items() if "'$bytes'" in repr(value)]
        opaque += [name for name, each in weights.items() if is_extra(name) and each.dtype == torch.uint8]
        self._opaque = tuple(clean_name(name).rpartition("_extra_state")[0] for name in opaque)

    def hold(self, name: str, tensors: Iterable[Tensor]) -> bool:
        """Return whether all of an attribute's tensors are held, as tensors or as numbers."""
        return name.startswith(self._opaque) or all(
            any(_equal(each, other) for other in self._tensors) or _contains(self._values, _numbers(each))
            for each in tensors
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    return one is other or torch.equal(one.detach().cpu(), other.detach().cpu())


def _numbers(tensor: Tensor) -> Any:
    return tensor.tolist() if tensor.numel() <= _MANY else None


def _contains(tree: Any, numbers: Any) -> bool:
    if numbers is None:
        return False
    inside = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return bool(tree == numbers) or any(_contains(each, numbers) for each in inside)


class _Candidate(NamedTuple):
    """Tensors that a checkpoint may not hold.

    Attributes:
        tensors: The tensors, by their place in an attribute.
        grows: Whether another tensor beside them is a change: in a list, but not in a dict, which caches.
        by_value: Whether only other values are a change.
    """

    tensors: dict[Any, Tensor]
    grows: bool = False
    by_value: bool = False


def _candidates(task: nn.Module) -> Iterator[tuple[str, _Candidate]]:
    """Yield buffers that are not persistent and attributes with tensors, by full name."""
    own = {id(each) for each in task.parameters()}
    for prefix, module in _modules(task, "", set()):
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                yield clean_name(prefix + name), _Candidate({None: buffer}, by_value=True)
        if _is_of_library(type(module)):  # type: ignore[arg-type]  # mypy: no class of modules is hashable
            continue
        for name, value in vars(module).items():
            if name in _OF_MODULES or isinstance(value, _PLAIN):
                continue
            tensors = _tensors(value, own)
            # torch's weight_norm, spectral_norm and pruning compute the tensor in each forward.
            computed = f"{name}_g" in module._parameters or f"{name}_orig" in module._parameters
            if tensors and not computed:
                yield clean_name(prefix + name), _Candidate(tensors, isinstance(value, (list, deque)))


@cache
def _is_of_library(kind: type) -> bool:
    return {each.__module__.partition(".")[0] for each in kind.__mro__} <= _LIBRARIES


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))


def _modules(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with the prefix of their attributes' names, except metrics, which have an own state."""
    if module in seen or _is_metric(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from _modules(child, f"{prefix}{name}.", seen)


def _tensors(value: Any, own: Collection[int]) -> dict[Any, Tensor]:
    """Return the tensors in an attribute's value by their place, except parameters of the task.

    Args:
        value: The value.
        own: The ids of the task's parameters.
    """
    found: dict[Any, Tensor] = {}
    seen: set[int] = set()

    def search(place: tuple[Any, ...], each: Any, depth: int) -> None:
        if isinstance(each, Tensor):
            if id(each) not in own:
                found[place] = each
            return
        if depth == 0 or id(each) in seen or len(found) >= _MANY:
            return
        seen.add(id(each))
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(each, nn.Module):  # in a container, where torch does not look for modules
            items = () if _is_metric(each) else chain(each.named_parameters(), each.named_buffers())
        elif isinstance(each, dict):
            items = each.items()
        elif isinstance(each, (list, tuple, deque)):
            items = enumerate(each)
        elif not isinstance(each, type) and type(each).__module__.partition(".")[0] not in _OPAQUE:
            items = getattr(each, "__dict__", {}).items()
        for key, inner in islice(items, _MANY):
            search((*place, key), inner, depth - 1)

    search((), value, _DEPTH)
    return found


def _marks(candidate: _Candidate) -> dict[Any, _Mark]:
    return {key: _mark(each, candidate.by_value) for key, each in candidate.tensors.items()}


def _mark(tensor: Tensor, by_value: bool) -> _Mark:
    shape = tuple(tensor.shape)
    if by_value and not tensor.is_meta:
        data = tensor.detach().cpu().contiguous().reshape(-1)
        return _no_reference, zlib.crc32(data.view(torch.uint8).numpy().tobytes()), shape
    return weakref.ref(tensor), -1 if tensor.is_inference() else tensor._version, shape


def _no_reference() -> None:
    """Stand for a weak reference to a tensor that is compared by its values."""


def _differs(before: Mapping[Any, _Mark], now: Mapping[Any, _Mark], grows: bool) -> bool:
    """Return whether a tensor was changed or replaced, or a list of tensors has grown."""
    return (grows and len(now) > len(before) > 0) or any(
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
