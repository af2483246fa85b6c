"""State of a task that its state dict leaves out: what its attributes hold and a fit has changed.

A value becomes a node: a plain value, or a list that begins with the name of a method of `_Restorer`, without
`as_`. An object that has no node has a digest alone, so that a change of it is known. A file fills objects of
the program, makes tensors, arrays, generators and what `_made_of` lists, and calls nothing of the user's but
`load_state_dict`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from drivetrain.checkpoint.format.tensors import CODES, bytes_of
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.random_streams import generator_state, load_generator_state
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.task.attributes import GENERATORS, OF_MODULES, is_skipped, modules_of

Node = Any
"""A value as a checkpoint holds it."""

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})

_MAPPINGS: tuple[Any, ...] = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset, deque, torch.Size)

_FACTORIES = (int, float, list, dict, set)
"""Functions of a defaultdict that are stored."""

_VALUES = (tuple, frozenset, Enum, np.generic, complex)
"""Classes of objects whose identity means nothing."""

_OF_PYTHON = 1 << 9
"""The flag of classes written in Python, which have attributes alone (Py_TPFLAGS_HEAPTYPE)."""

_STATEFUL = ("state_dict", "load_state_dict")

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

_MOST, _TOO_MANY = 200_000, 1_000_000
"""The largest size of all attributes in a checkpoint, and of an attribute that is read at all.

A container counts as three lists of JSON and a tensor as five. JSON may have half as many lists again, 20
times as many numbers, and 300 bytes for each list.
"""

_DEEP = 40
"""The most levels of containers; JSON has a hundred, and two for each of these."""

_NONE = object()


class AttributeState:
    """The attributes of a task that differ from what they were when a fit began.

    Args:
        task: The task, prepared by its strategy, before anything of a checkpoint is restored.
        declared: Groups of metrics that the run saves by itself.
        ranks: The ranks that save together.

    Attributes:
        lost: The attributes that have changed and cannot be stored, with the reason; on rank 0, of all ranks.
    """

    def __init__(
        self, task: nn.Module, declared: Iterable[Iterable[Any] | None] = (), ranks: Ranks = ALONE
    ) -> None:
        self.lost: dict[str, str] = {}
        self._task, self._ranks = task, ranks
        self._declared = [each for metrics in declared for each in metrics or ()]
        self._restored, self._told = set[str](), set[str]()
        self._begun = _Walk(task, self._declared)
        self._marks = {each.name: each.mark for each in self._begun.attributes()}
        self._begun.objects.clear()  # the program may drop them

    def gather(self) -> list[dict[str, Node]]:
        """Return, on rank 0, what has changed: all of its own, and of each other rank what differs from that.

        All ranks call it together. The others return an empty list.
        """
        nodes, marks = self._changed()
        first = self._ranks.first(lambda: marks)
        own = {name: node for name, node in nodes.items() if marks[name] != first.get(name, _NONE)}
        own |= {name: ["begun"] for name in first.keys() - nodes.keys()}
        of_ranks = self._ranks.gather_first((own, self.lost)) or []
        for rank, (_, lost) in enumerate(of_ranks):
            for name, reason in lost.items():
                self.lost.setdefault(name, f"{reason} on rank {rank}")
        return [nodes, *(own for own, _ in of_ranks[1:])] if of_ranks else []

    def _changed(self) -> tuple[dict[str, Node], dict[str, Any]]:
        """Return the attributes that have changed, and a mark of each, which is equal for equal values."""
        self.lost, left = {}, _MOST // self._ranks.size
        nodes, marks, gone = dict[str, Node](), dict[str, Any](), {*self._marks}
        walk = _Walk(self._task, self._declared, self._begun)
        for each in walk.attributes():
            gone.discard(each.name)
            is_same = each.mark is not None and each.mark == self._marks.get(each.name)
            if is_same and each.name not in self._restored:
                continue
            if each.cannot or each.size > left:
                self.lost[each.name] = each.cannot or "too large for a checkpoint"
                walk.forget()
            else:
                left -= each.size
                nodes[each.name], marks[each.name] = each.node, each.mark
        for name in gone:
            tables, key = _tables(self._task, name)
            now = next((each[key] for each in tables if each.get(key) is not None), None)
            if now is None:
                nodes[name], marks[name] = ["gone"], None
            else:  # code, a class or a module has taken its place
                self.lost[name] = _title(type(now))
        return nodes, marks

    def news(self) -> dict[str, str]:
        """Return what is lost and was not in an earlier result of this method."""
        new = {name: reason for name, reason in self.lost.items() if name not in self._told}
        self._told |= new.keys()
        return new

    def load(self, state: Mapping[str, Node], device: torch.device) -> list[str]:
        """Restore attributes; return those that the program has no place for any more.

        Args:
            device: Receives the tensors that were not on a CPU.
        """
        walk = _Walk(self._task, self._declared)
        for _ in walk.attributes():
            pass
        reader, missing = _Restorer(walk.objects, self._task, device), []
        for name, node in state.items():
            tables, key = _tables(self._task, name)
            try:
                if not tables or key in OF_MODULES:
                    raise _MissingError
                table = next((each for each in tables if key in each), tables[-1])
                if node == ["gone"]:
                    table.pop(key, None)
                elif node != ["begun"]:
                    table[key] = reader.value(node, name)
                self._restored.add(name)
            except _MissingError:
                missing.append(name)
        return missing


def _tables(task: nn.Module, name: str) -> tuple[list[Any], str]:
    """Return where an attribute may be, and its name there; nowhere if the task has no such module."""
    prefix, _, key = name.rpartition(".")
    module = _modules(task).get(prefix)
    tables = [] if module is None else [module._parameters, module._buffers, module._modules, vars(module)]
    return tables, key


def _modules(task: nn.Module, declared: Iterable[Any] = ()) -> dict[str, nn.Module]:
    return {clean_name(prefix.rstrip(".")): module for prefix, module in modules_of(task, declared)}


def _weights(task: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that are among a checkpoint's weights."""
    names = {clean_name(name) for name in task.state_dict()}
    all_names = *task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)
    return {clean: each for name, each in all_names if (clean := clean_name(name)) in names}


class _Attribute(NamedTuple):
    """An attribute's value: its mark is None if it cannot be read; `cannot` is why it cannot be stored."""

    name: str
    node: Node
    mark: str | None
    size: int
    cannot: str


class _Walk:
    """Reads a task's attributes.

    Args:
        declared: Metrics that are left out.
        begun: The walk when the fit began; None if it begins now.

    Attributes:
        objects: The objects in the attributes, by place.
    """

    def __init__(self, task: nn.Module, declared: Iterable[Any], begun: _Walk | None = None) -> None:
        self.objects: dict[str, Any] = {}
        found, weights = _modules(task, declared), _weights(task)
        self._declared, self._begun = {id(each) for each in declared}, begun or self
        self._modules: dict[str, nn.Module] = {
            name: each for name, each in found.items() if begun is None or name in begun._modules
        }
        self._named = {id(each): name for name, each in (*self._modules.items(), *weights.items())}
        self._memory = {_address(each): (name, each.dtype) for name, each in weights.items()}
        self._places: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._held: list[Any] = []  # so that no other object takes an id

    def attributes(self) -> Iterator[_Attribute]:
        """Yield what may be state."""
        for prefix, module in self._modules.items():
            prefix = f"{prefix}." if prefix else ""
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and id(tensor) not in self._named:
                        yield self._attribute(tensor, prefix + key)
            for key, value in vars(module).items() if not is_skipped(module) else ():
                # torch's weight_norm, spectral_norm and pruning compute the tensor in each forward.
                is_computed = not {f"{key}_g", f"{key}_orig"}.isdisjoint(module._parameters)
                is_elsewhere = isinstance(value, nn.Module) or self._is_skipped(value)
                is_of_torch = key in OF_MODULES or key.startswith("__")  # two underscores: fully_shard's
                if not (is_of_torch or is_computed or is_elsewhere):
                    yield self._attribute(value, prefix + key)

    def _is_skipped(self, value: Any) -> bool:
        return is_skipped(value) or id(value) in self._declared

    def _attribute(self, value: Any, name: str) -> _Attribute:
        self._hash, self._cannot, self._size, self._depth = xxhash.xxh3_128(), "", 0, 0
        self._latest, self._seen = len(self._places), dict[int, tuple[int, Any]]()
        node = mark = None
        try:
            node = self._node(value, name)
            mark = self._hash.hexdigest()
        except Exception:  # too large, too deep, in use by a thread, or of a class whose own methods fail
            self._cannot = f"{_title(type(value))}, which cannot be read"
        if self._cannot:
            self.forget()
        return _Attribute(name, node, mark, self._size, self._cannot)

    def forget(self) -> None:
        """Let no attribute refer to a part of the latest one, which is not stored."""
        for each in [*self._places][self._latest :]:
            del self._places[each]

    def _mix(self, *token: Any) -> None:
        data = repr(token).encode()
        self._hash.update(data)
        self._size += len(data) // (300 if data.isascii() else 100)

    def _node(self, value: Any, place: str | None) -> Node:
        """Return a value as a checkpoint holds it, and add it to the digest.

        Args:
            place: Where the value is; None for one that is made only to be read.
        """
        kind: Any = type(value)
        if kind in _PLAIN:
            self._mix(value)
            return value
        same, is_begun = self._named.get(id(value)), False
        if same is None and place is not None and not isinstance(value, _VALUES):
            first = self._places.setdefault(id(value), place)
            same = first if first != place else None
            self.objects[first], self._ids[first] = value, id(value)
            is_begun = self._begun._ids.get(place) == id(value)
        if same is not None:
            self._mix("same", same)
            return ["same", same]
        self._size, self._depth = self._size + 3, self._depth + 1
        if self._size > _TOO_MANY:
            raise OverflowError
        if self._depth > _DEEP:
            self._cannot = self._cannot or f"over {_DEEP} levels of containers"
        self._mix(_path(kind), is_begun)
        node = self._read(value, kind, place, is_begun)
        self._depth -= 1
        return node

    def _read(self, value: Any, kind: Any, place: str | None, is_begun: bool) -> Node:
        if isinstance(value, Tensor):
            return self._tensor(value, is_begun)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, is_begun)
        if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            device = value.device.type if isinstance(value, torch.Generator) else "cpu"
            return ["generator", is_begun, device, self._node(generator_state(value), None)]
        if is_begun and all(callable(getattr(kind, each, None)) for each in _STATEFUL):
            return ["state", _path(kind), self._node(value.state_dict(), None)]
        return self._object(value, kind, place, is_begun)

    def _object(self, value: Any, kind: Any, place: str | None, is_begun: bool) -> Node:
        is_skipped = self._is_skipped(value)
        made = None if is_skipped else _made_of(value, kind)
        if made is None:
            self._mix(self._identity(value) if is_skipped else self._digest(value))
            return self._lose(value)
        arguments, keys, items = made
        self._mix(arguments, len(items))
        is_set = issubclass(kind, (set, frozenset))
        for each in keys or items if keys or is_set else ():
            if isinstance(each, (Tensor, *GENERATORS)) and id(each) not in self._named:
                self._lose(each)  # it is found by its identity
        if keys is not None:
            nodes = self._nodes(items, place, keys)
            return ["made", _path(kind), is_begun, arguments, self._nodes(keys, None, keys), nodes]
        nodes = self._nodes(items, None if is_set else place, range(len(items)))
        return ["made", _path(kind), is_begun, arguments, None, nodes]

    def _nodes(self, values: list[Any], place: str | None, names: Iterable[Any]) -> list[Node]:
        if {*map(type, values)} <= _PLAIN:
            self._mix(values)
            self._size += len(values) // 20
            return values
        places = (None if place is None else f"{place}.{name!r}" for name in names)
        return [*map(self._node, values, places)]

    def _tensor(self, tensor: Tensor, is_begun: bool) -> Node:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        owner, dtype = self._memory.get(_address(tensor), (None, tensor.dtype))
        if not is_plain or tensor.is_meta or tensor.dtype not in CODES or tensor.dtype != dtype:
            self._mix(self._identity(tensor), -1 if tensor.is_inference() else tensor._version)
            return self._lose(tensor)
        shape, strides = [*tensor.shape], [*tensor.stride()]
        if owner is not None:
            self._mix(owner, shape, strides, tensor.storage_offset())
            return ["same", owner, shape, strides, tensor.storage_offset()]
        if type(tensor) is nn.Parameter and not is_begun:
            self._lose(tensor)
        learnt = tensor.requires_grad and tensor.is_leaf
        values = tensor.detach().cpu().resolve_conj().resolve_neg()
        whole = values.contiguous()
        self._size += 2
        self._mix(learnt, shape, dtype)
        self._hash.update(bytes_of(whole))
        is_dense = whole is not values and [*torch.empty_like(values, device="meta").stride()] == strides
        return ["tensor", is_begun, tensor.device.type, learnt, strides if is_dense else None, whole]

    def _array(self, value: Any, is_begun: bool) -> Node:
        is_number = getattr(torch, value.dtype.name, None) in CODES
        if not is_number or value.__array_interface__["data"][0] in self._memory:  # or a weight's
            self._mix(self._digest(value))
            return self._lose(value)
        self._mix(value.dtype.str, value.shape)
        self._hash.update(np.ascontiguousarray(value).data)
        return ["array", is_begun, value] if isinstance(value, np.ndarray) else value

    def _lose(self, value: Any) -> None:
        self._cannot = self._cannot or _title(type(value))

    def _identity(self, value: Any) -> int:
        self._held.append(value)
        return id(value)

    def _digest(self, value: Any) -> str:
        """Return a digest of what pickle would store of an object; of its identity if pickle cannot."""
        if id(value) in self._seen:
            return f"object {self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value
        outer, cannot, self._hash = self._hash, self._cannot, xxhash.xxh3_128()
        kind: Any = type(value)
        reduce: Any = copyreg.dispatch_table.get(kind, lambda each: kind.__reduce_ex__(each, 2))
        try:
            found = reduce(value)
            items = () if isinstance(found, str) else ([*each] for each in found[3:5] if each is not None)
            parts: Any = [found if isinstance(found, str) else found[1:3], *items]
        except Exception:  # of the object's own methods too
            parts = self._identity(value)
        self._node(parts, None)
        digest, self._hash, self._cannot = self._hash.hexdigest(), outer, cannot
        return digest


class _MissingError(Exception):
    """The program has no place for a stored value any more."""


class _Restorer:
    """Makes values of nodes; fills objects that the fit has kept, so that all who hold them see the values.

    Args:
        objects: The objects of the program, by place.
        device: Receives the tensors that were not on a CPU.
    """

    def __init__(self, objects: dict[str, Any], task: nn.Module, device: torch.device) -> None:
        self._objects, self._device = {**objects, **_modules(task), **_weights(task)}, device

    def value(self, node: Node, place: str) -> Any:
        """Return the value of a node, for an attribute or a part of one."""
        if type(node) is not list:
            return node
        made = getattr(self, f"as_{node[0]}")(place, self._objects.get(place, _NONE), *node[1:])
        self._objects[place] = made
        return made

    def _values(self, nodes: Iterable[Node], place: str, names: Iterable[Any]) -> list[Any]:
        return [self.value(node, f"{place}.{name!r}") for node, name in zip(nodes, names, strict=True)]

    def as_same(self, place: str, now: Any, other: str, *view: Any) -> Any:
        if other not in self._objects:
            raise _MissingError
        found = self._objects[other]
        return found.detach().as_strided(*view) if view else found

    def as_tensor(
        self, place: str, now: Any, is_begun: bool, device: str, learnt: bool, strides: Any, stored: Tensor
    ) -> Tensor:
        made = stored.clone()
        if strides is not None:
            made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)
        made = made.to(device if device == "cpu" else self._device)
        is_tensor = is_begun and isinstance(now, Tensor) and not now.is_inference()
        if is_tensor and (now.shape, now.dtype, now.device) == (made.shape, made.dtype, made.device):
            now.data.copy_(made)  # `data` hides it from autograd
            return now  # type: ignore[no-any-return]
        return made.requires_grad_(learnt)

    def as_array(self, place: str, now: Any, is_begun: bool, stored: Any) -> Any:
        is_array = is_begun and type(now) is np.ndarray and now.flags.writeable
        if is_array and (now.shape, now.dtype) == (stored.shape, stored.dtype):
            now[...] = stored
            return now
        return stored.copy()

    def as_generator(self, place: str, now: Any, is_begun: bool, device: str, node: Node) -> Any:
        state = self.value(node, f"{place}.state")
        if not is_begun or not isinstance(now, GENERATORS):
            if isinstance(state, Tensor):
                now = torch.Generator("cpu" if device == "cpu" else self._device)
            elif "words" in state:
                now = random.Random()
            elif (name := state["bit_generator"]) in _BIT_GENERATORS:
                now = np.random.Generator(getattr(np.random, name)())
        if now is _NONE:
            raise _MissingError
        load_generator_state(now, state)
        return now

    def as_state(self, place: str, now: Any, path: str, node: Node) -> Any:
        if _path(type(now)) != path:
            raise _MissingError
        now.load_state_dict(self.value(node, f"{place}.state_dict"))
        return now

    def as_made(
        self, place: str, now: Any, path: str, is_begun: bool, given: list[Any], keys: Any, nodes: list[Node]
    ) -> Any:
        kind: Any = _class(path) or object
        names = range(len(nodes)) if keys is None else self._values(keys, f"{place}.keys", range(len(keys)))
        if kind is complex:
            return complex(*given)
        if issubclass(kind, Enum) and given[0] in kind.__members__:
            return kind.__members__[given[0]]
        if kind in (tuple, frozenset, torch.Size):
            return kind(self._values(nodes, place, names))
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return tuple.__new__(kind, self._values(nodes, place, names))
        is_data = dataclasses.is_dataclass(kind)
        if kind not in (*_MAPPINGS, *_SEQUENCES) and not is_data:
            raise _MissingError
        if not is_begun or type(now) is not kind:
            now = object.__new__(kind) if is_data else _empty(kind, given)
        self._objects[place] = now  # a part may refer to it
        _fill(now, is_data, names if keys is not None else None, self._values(nodes, place, names))
        return now


def _empty(kind: Any, given: list[Any]) -> Any:
    if kind is defaultdict:
        return kind(next(each for each in _FACTORIES if each.__name__ == given[0]))
    return kind([], *given)


def _fill(container: Any, is_data: bool, names: Iterable[Any] | None, parts: list[Any]) -> None:
    if is_data:
        for name, each in zip(names or (), parts, strict=True):
            object.__setattr__(container, name, each)  # also of a frozen one
        return
    container.clear()
    if names is None:
        (container.update if isinstance(container, set) else container.extend)(parts)
    for name, each in zip(names, parts, strict=True) if names is not None else ():
        container[name] = each


def _made_of(value: Any, kind: Any) -> tuple[list[Any], list[Any] | None, list[Any]] | None:
    """Return a value's arguments, keys and items; None of an object that no file can make."""
    if kind is defaultdict:
        factory = value.default_factory
        return ([factory.__name__], [*value], [*value.values()]) if factory in _FACTORIES else None
    if kind in _MAPPINGS:
        return [], [*value], [*value.values()]
    if kind is deque:
        return [value.maxlen], None, [*value]
    if kind in _SEQUENCES:
        return [], None, [*value]
    if kind is complex:
        return [value.real, value.imag], None, []
    if _class(_path(kind)) is not kind:
        return None
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return [], None, [*value]
    if issubclass(kind, Enum) and value.name in kind.__members__:
        return [value.name], None, []
    return _data_of(value) if dataclasses.is_dataclass(kind) else None


def _data_of(value: Any) -> Any:
    if not all(each.__flags__ & _OF_PYTHON for each in type(value).__mro__[:-1]):
        return None
    state: Any = object.__getstate__(value) or {}
    parts = {**(state[0] or {}), **state[1]} if isinstance(state, tuple) else state
    return [], [*parts], [*parts.values()]


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _title(kind: type) -> str:
    return _path(kind).replace(":", ".").removeprefix("builtins.")


def _class(path: str) -> Any:
    """Return a class that the program has loaded, or None; nothing is imported or called."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) else None


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; of one without memory, a number of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, sharded or not made yet
        return -id(tensor)
