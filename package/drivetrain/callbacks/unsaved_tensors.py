"""Tensors that training changes and no checkpoint holds."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.weights.module_state import clean_name, is_extra
from drivetrain.core.messages import logger
from drivetrain.strategies.transforms.compile import inside_compiled
from drivetrain.task.attributes import attributes_of, leaves, modules_of

if TYPE_CHECKING:
    from drivetrain.engine.engine import Engine

_LOG = logger(__name__)

WARNING = "training changes tensors that no checkpoint holds"
"""The beginning of the warning."""

_MANY = 1000
"""The number of elements of a container to check."""

_SETS = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "zeros_", "ones_", "constant_"})
"""Functions of torch that write all of their first argument, whatever it held."""

_LOOKS = frozenset(
    {"size", "dim", "numel", "stride", "__len__", "type", "device", "is_floating_point", "is_contiguous"}
    | {"data_ptr", "element_size", "ndimension", "get_device", "detach_", "requires_grad_", "resize_"}
)
"""Functions of torch that read no values; those whose name begins with `new_` or ends in `_like`, too."""

_LARGEST_ARRAY = 1 << 26
"""The most bytes of an array of numpy that is compared; larger ones are data."""

_Value: TypeAlias = "Tensor | np.ndarray[Any, Any]"
_Place = tuple[str, Any]
"""An attribute's full name, and a tensor's place in it."""


class _Mark(NamedTuple):
    """What a tensor was at some time.

    Attributes:
        reference: A weak reference to it.
        version: torch's count of its changes; -1 if nobody counts them.
        shape: Its shape.
        checksum: The checksum of its values.
    """

    reference: Callable[[], _Value | None]
    version: int
    shape: tuple[int, ...]
    checksum: int


class UnsavedTensors:
    """Finds tensors that training changes, that steps read, and that no checkpoint holds.

    It checks buffers and trained parameters that the state dict leaves out, and a module's plain attributes,
    with what is in their containers and in objects of the user's classes. In the second step of a program,
    each call of torch in `training_step` is looked at, and again in a step after a save, if a tensor has
    changed that no step was seen to read. A tensor that is written whole before it is read is a record or
    scratch memory, and one that only grows is a cache. Nobody sees who reads an array of numpy: those are
    named that are changed in place. Compiled code is not looked at, so that there each change counts.

    Args:
        engine: Runs the task, and has made the first step of this program.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        task = engine.task
        buffers = {clean_name(name) for name, _ in task.named_buffers()}
        self._dropped = buffers - {*map(clean_name, task.state_dict())} if buffers else buffers
        self._marks = {name: _marks(each) for name, each in _candidates(task, self._dropped)}
        self._known: set[str] = set()
        self._watch: _Watch | None = None
        self._watched: set[_Place] = set()
        self._read: set[_Place] = set()
        self._written: set[_Place] = set()
        self._can_watch = not engine.compilation.parts and not inside_compiled(engine.task)
        if self._marks:
            self._watch_next(self._marks)

    def _watch_next(self, names: Collection[str]) -> None:
        """Look at the calls of torch in the next step."""
        if not self._can_watch:
            return
        engine, inner = self._engine, self._engine.run_step
        self._watch = watch = _Watch(
            {
                (name, place): tensor
                for name, each in _candidates(engine.task, self._dropped)
                if name in names
                for place, tensor in each.tensors.items()
                if isinstance(tensor, Tensor)
            }
        )

        def watched(batch: Any) -> Any:
            if watch.is_over:
                return inner(batch)
            with watch:
                return inner(batch)

        def end() -> None:
            watch.is_over = True
            if engine.run_step is watched:
                engine.run_step = inner

        watch.end = end
        engine.run_step = watched

    def end_step(self) -> None:
        """Note what a step has read, if it was looked at."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            self._watched |= watch.places
            self._read |= watch.read
            self._written |= watch.written - watch.read

    def warn(self, task: nn.Module, saved: Snapshot) -> None:
        """Warn of tensors that have changed since the first step, once for each name."""
        weights = saved.tensors["model"]
        skipped = self._known | weights.keys()
        now = {name: each for name, each in _candidates(task, self._dropped) if name not in skipped}
        needed = {name: self._needed(name, each) for name, each in now.items()}
        changed = [name for name, each in needed.items() if each]
        if unread := [name for name, each in needed.items() if each is None]:
            self._watch_next(unread)
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
            f"{WARNING}: {', '.join(map(repr, changed))} of {type(task).__name__}. A resumed run begins with"
            " other values. Register the tensor as a buffer (register_buffer, without persistent=False),"
            " return it from get_extra_state of its module, or keep it in a callback that has state_dict."
            " 'drivetrain check-resume' finds out whether a step depends on it"
        )

    def _needed(self, name: str, candidate: _Candidate) -> bool | None:
        """Return whether a step needs what training has changed; None if none was seen to read it."""
        before, unread = self._marks.setdefault(name, {}), False
        if candidate.grows and len(candidate.tensors) > len(before) > 0:
            if not self._can_watch or any((name, place) in self._read for place in before):
                return True
            unread = True
        for place, tensor in candidate.tensors.items():
            mark = before.get(place)
            if mark is None:  # it is new, as in a dict that caches
                before[place] = _mark(tensor)
                continue
            is_same = mark.reference() is tensor
            if is_same and mark.version == _version(tensor) >= 0 and not candidate.by_value:
                continue
            is_array, key = not isinstance(tensor, Tensor), (name, place)
            if self._can_watch and not is_array and key not in self._read:
                # Nobody sees a callback read what it changes in place.
                if not is_same or key in self._written or key not in self._watched:
                    unread = unread or key not in self._written
                    continue
            elif is_array and not is_same:
                before[place] = _mark(tensor)
                continue
            now = _mark(tensor)
            if mark.checksum not in (now.checksum, _checksum(_part(tensor, mark.shape))):
                return True
            before[place] = now
        return None if unread else False


class _Watch(TorchFunctionMode):
    """Notes which tensors a step reads before it writes all of them.

    Attributes:
        places: All places.
        read: The places of those that are read first.
        written: The places of those that are written before what is written is read.
        is_over: Whether the step is over.
    """

    def __init__(self, tensors: Mapping[_Place, Tensor]) -> None:
        super().__init__()
        self.places, self.is_over = set(tensors), False
        self.read: set[_Place] = set()
        self.written: set[_Place] = set()
        self.end: Callable[[], None]
        self._left: dict[int, tuple[Callable[[], Tensor | None], list[_Place]]] = {}
        for place, tensor in tensors.items():
            self._left.setdefault(id(tensor), (weakref.ref(tensor), []))[1].append(place)
        self._parts: set[tuple[int, str | None]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._left:
            self._note(getattr(func, "__name__", ""), args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        is_look = name in _LOOKS or name.startswith("new_") or name.endswith("_like")
        if is_look or (name == "__get__" and not isinstance(result, Tensor)):
            return
        first = args[0] if args else None
        whole = name in _SETS or (name == "__set__" and isinstance(args[1], Tensor))  # `.data = other`
        if name in ("__setitem__", "__getitem__"):
            part = id(first), _key(args[1])
            whole = name == "__setitem__" and part[1] in ("slice(None, None, None)", "Ellipsis")
            if name == "__setitem__" and not whole:
                self._parts.add(part)
                self.written.update(self._left.get(id(first), (None, ()))[1])  # unless another part is read
            elif part[1] is not None and part in self._parts:  # what this step has written
                return
        read = [*args[1:], *(each for name, each in kwargs.items() if name != "out")]
        if not whole and name != "__setitem__" and not (name == "to" and result is first):
            read.append(first)
        for each in _flat(read):
            self.read.update(self._take(each))
        for each in _flat([first if whole else None, kwargs.get("out")]):
            self.written.update(self._take(each))

    def _take(self, tensor: Tensor) -> list[_Place]:
        reference, places = self._left.get(id(tensor), (None, []))
        if reference is None or reference() is not tensor:
            return []
        del self._left[id(tensor)]
        return places


def _key(index: Any) -> str | None:
    """Return an index as a text; None if a tensor is in it, whose values are on a device."""
    parts = index if isinstance(index, tuple) else (index,)
    inner = [(each.start, each.stop, each.step) if isinstance(each, slice) else (each,) for each in parts]
    is_plain = all(isinstance(each, (int, type(None), type(...))) for each in chain.from_iterable(inner))
    return repr(index) if is_plain else None


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _flat(each)


class _Extras:
    """What a checkpoint holds beside weights: extra states of modules, and states of callbacks."""

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

    def hold(self, name: str, values: Iterable[_Value]) -> bool:
        """Return whether all of an attribute's tensors are held, as tensors or as numbers."""
        tensors = [torch.as_tensor(each) for each in values]
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

    tensors: dict[Any, _Value]
    grows: bool = False
    by_value: bool = False


def _candidates(task: nn.Module, dropped: Collection[str]) -> Iterator[tuple[str, _Candidate]]:
    """Yield the buffers that the state dict drops and attributes with tensors, by full name."""
    own = {id(each) for each in task.parameters()}
    for prefix, module in modules_of(task):
        for name, buffer in module._buffers.items():
            if buffer is not None and (full := clean_name(prefix + name)) in dropped:
                yield full, _Candidate({None: buffer}, by_value=True)
        for name, value in attributes_of(module):
            tensors = _tensors(value, own)
            # torch's weight_norm, spectral_norm and pruning compute the tensor in each forward.
            computed = f"{name}_g" in module._parameters or f"{name}_orig" in module._parameters
            if tensors and not computed:
                yield clean_name(prefix + name), _Candidate(tensors, isinstance(value, (list, deque)))


def _tensors(value: Any, own: Collection[int]) -> dict[Any, _Value]:
    """Return the tensors and arrays in an attribute's value by their place, except parameters of the task."""
    found: dict[Any, _Value] = {}
    for place, each in leaves(value, (Tensor, np.ndarray)):
        if isinstance(each, np.ndarray):
            if each.dtype.kind in "biuf" and each.nbytes <= _LARGEST_ARRAY:
                found[place] = each
        # A step cannot go on in the graph of an earlier one, so that such a tensor is a record.
        elif id(each) not in own and each.grad_fn is None:
            found[place] = each
    return found


def _marks(candidate: _Candidate) -> dict[Any, _Mark]:
    return {place: _mark(each) for place, each in candidate.tensors.items()}


def _mark(value: _Value) -> _Mark:
    return _Mark(weakref.ref(value), _version(value), tuple(value.shape), _checksum(value))


def _version(value: _Value) -> int:
    return -1 if not isinstance(value, Tensor) or value.is_inference() else value._version


def _checksum(value: _Value) -> int:
    if isinstance(value, Tensor):
        if value.is_meta or value.layout is not torch.strided:
            return 0
        data = value.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(data.view(torch.uint8).numpy().tobytes())
    return zlib.crc32(np.ascontiguousarray(value).tobytes())


def _part(value: _Value, shape: tuple[int, ...]) -> _Value:
    """Return what a tensor of another shape holds at the beginning of each dimension."""
    if len(value.shape) != len(shape) or tuple(value.shape) == shape:
        return value
    return value[tuple(slice(size) for size in shape)]


def _storages(values: Iterable[_Value]) -> set[int]:
    """Return the memory addresses of tensors that have memory."""
    found = set()
    for each in values:
        if not isinstance(each, Tensor):
            found.add(each.__array_interface__["data"][0])
            continue
        try:
            found.add(each.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):  # sparse, sharded or not made yet
            continue
    return found - {0}
