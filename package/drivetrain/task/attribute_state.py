"""State of a task that its state dict leaves out: what its attributes hold and a fit has changed.

A value becomes a node: a plain value, or a list that begins with the name of a method of `_Restorer`, without
`as_`. A value that has no node has a digest alone, so that a change of it is known. A file fills objects of
the program and makes tensors, arrays and containers; it calls nothing of the user's but `load_state_dict`.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from drivetrain.checkpoint.format.tensors import CODES, bytes_of
from drivetrain.checkpoint.weights.module_state import clean_name, module_state
from drivetrain.core.random_streams import generator_state, load_generator_state
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.task.attributes import GENERATORS, OF_MODULES, is_skipped, modules_of

Node = Any
"""A value as a checkpoint holds it."""

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})

_MAPPINGS: tuple[Any, ...] = (dict, OrderedDict, Counter, defaultdict)
_CONTAINERS = {each.__name__: each for each in (*_MAPPINGS, list, tuple, deque, set, frozenset)}
_FILLED = (defaultdict, deque)
"""Containers that are filled and not made, because they have arguments."""

_MOST, _TOO_MANY = 200_000, 1_000_000
"""The largest size of all attributes in a checkpoint, and of an attribute that is read at all.

A list of JSON counts as one. JSON may have half as many lists again, 20 times as many numbers, and 300 bytes
for each list.
"""

_DEEP = 40
"""The most levels of containers; JSON has a hundred, and two for each of these."""

_STATEFUL = ("state_dict", "load_state_dict")

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
        self._told = set[str]()
        self._begun = _Walk(task, self._declared)
        self._saved = _saved(task)
        self._marks: dict[str, str | None] = {each.name: each.mark for each in self._begun.attributes()}
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
            if each.mark is not None and each.mark == self._marks.get(each.name):
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
                self.lost[name] = _title(now)
        return nodes, marks

    def strangers(self) -> list[str]:
        """Return the parameters and buffers that were added or removed since the fit began and since the last
        call.
        """
        before, self._saved = self._saved, _saved(self._task)
        return sorted(before ^ self._saved)

    def news(self) -> dict[str, str]:
        """Return what is lost and was not in an earlier result of this method."""
        new = {name: reason for name, reason in self.lost.items() if name not in self._told}
        self._told |= new.keys()
        return new

    def load(self, state: Mapping[str, Node], device: torch.device) -> list[str]:
        """Restore attributes; return those that the program does not have any more.

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
                self._marks[name] = None  # it differs from what the program makes
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


def _saved(task: nn.Module) -> set[str]:
    """Return the names of a task's parameters and persistent buffers, those that are None included."""
    return {name for part in module_state(task) for name in part}


def _weights(task: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that are among a checkpoint's weights."""
    names = {clean_name(name) for name in task.state_dict()}
    all_names = *task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)
    return {clean: each for name, each in all_names if (clean := clean_name(name)) in names}


class _Attribute(NamedTuple):
    """An attribute's value: its mark is None if it cannot be read; `cannot` is what cannot be stored."""

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
        objects: The objects in the attributes, by path.
    """

    def __init__(self, task: nn.Module, declared: Iterable[Any], begun: _Walk | None = None) -> None:
        self.objects: dict[str, Any] = {}
        weights, self._begun = _weights(task), begun or self
        self._declared = {id(each) for each in declared}
        self._modules: dict[str, nn.Module] = {
            name: each
            for name, each in _modules(task, declared).items()
            if begun is None or name in begun._modules
        }
        self._named = {id(each): name for name, each in (*self._modules.items(), *weights.items())}
        self._memory = {_address(each): name for name, each in weights.items()}
        self._paths: dict[int, str] = {}
        self._ids: dict[str, int] = {}
        self._held: list[Any] = []  # so that no other object takes an id

    def attributes(self) -> Iterator[_Attribute]:
        """Yield what may be state."""
        for prefix, module in self._modules.items():
            prefix = f"{prefix}." if prefix else ""
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
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
        self._name, self._latest = name, len(self._paths)
        node = mark = None
        try:
            node = self._node(value, name)
            mark = self._hash.hexdigest()
        except Exception:  # too large, too deep, in use by a thread, or of a class whose own methods fail
            self._cannot = f"{_title(value)}, which cannot be read"
        if self._cannot:
            self.forget()
        return _Attribute(name, node, mark, self._size, self._cannot)

    def forget(self) -> None:
        """Let no attribute refer to a part of the latest one, which is not stored."""
        for each in [*self._paths][self._latest :]:
            del self._paths[each]

    def _mix(self, *token: Any) -> None:
        self._write(ascii(token).encode())

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._size += len(data) // 200
        if self._size > _TOO_MANY:
            raise OverflowError

    def _lose(self, path: str, what: str) -> None:
        self._cannot = self._cannot or (what if path == self._name else f"{path}: {what}")

    def _node(self, value: Any, path: str, is_lasting: bool = True) -> Node:
        """Return a value as a checkpoint holds it, and add it to the digest.

        Args:
            is_lasting: Whether the value is not just made to be read, so that others may refer to it.
        """
        if type(value) in _PLAIN:
            self._mix(value)
            return value
        same, is_begun = self._named.get(id(value)), False
        if same is None and is_lasting and not isinstance(value, (tuple, frozenset, np.generic)):
            first = self._paths.setdefault(id(value), path)
            same = first if first != path else None
            self.objects[first], self._ids[first] = value, id(value)
            is_begun = self._begun._ids.get(path) == id(value)
        self._size, self._depth = self._size + 5, self._depth + 1
        self._mix(_title(value), same, is_begun)
        if self._depth > _DEEP:
            self._lose(path, f"over {_DEEP} levels of containers")
        node = ["same", same] if same is not None else self._read(value, path, is_begun, is_lasting)
        self._depth -= 1
        return node

    def _read(self, value: Any, path: str, is_begun: bool, is_lasting: bool) -> Node:
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path, is_begun)
        if (kind is np.ndarray or isinstance(value, np.generic)) and _is_number(value.dtype):
            self._mix(value.dtype, value.shape)
            self._hash.update(np.ascontiguousarray(value).tobytes())
            return ["array", is_begun, value] if kind is np.ndarray else value
        if is_begun and isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            return ["generator", self._node(generator_state(value), f"{path}.state", is_lasting=False)]
        if is_begun and all(callable(getattr(kind, each, None)) for each in _STATEFUL):
            state = self._node(value.state_dict(), f"{path}.state_dict()", is_lasting=False)
            return ["state", _title(value), state]
        is_made = kind not in _FILLED or is_begun
        if _CONTAINERS.get(kind.__name__) is kind and is_made:
            return self._container(value, path, is_begun, is_lasting)
        return self._unstorable(value, path, _title(value))

    def _container(self, value: Any, path: str, is_begun: bool, is_lasting: bool) -> Node:
        kind: Any = type(value)
        is_mapping = kind in _MAPPINGS
        keys = [*value] if is_mapping or kind in (set, frozenset) else []
        if not all(map(_is_key, keys)):
            return self._unstorable(value, path, f"{_title(value)} with other keys than numbers and texts")
        self._mix(keys, len(value))
        items = [*value.values()] if is_mapping else [*value]
        if {*map(type, items)} <= _PLAIN:
            self._mix(items)
            self._size += len(items) // 20
        elif is_mapping or not keys:
            names = keys or range(len(items))
            paths = (f"{path}[{name!r}]" for name in names)
            items = [self._node(each, at, is_lasting) for each, at in zip(items, paths, strict=True)]
        return [kind.__name__, is_begun, keys, items]

    def _unstorable(self, value: Any, path: str, what: str) -> None:
        self._lose(path, what)
        _Digest(self._write, self._named, self._held).dump(value)

    def _tensor(self, tensor: Tensor, path: str, is_begun: bool) -> Node:
        owner = self._memory.get(_address(tensor))
        is_plain = type(tensor) is Tensor or (type(tensor) is nn.Parameter and is_begun)
        is_plain = is_plain and tensor.layout is torch.strided and not tensor.is_meta
        if not is_plain or tensor.dtype not in CODES or owner is not None:
            self._held.append(tensor)
            version = -1 if tensor.is_inference() else tensor._version
            self._mix(owner, tensor.shape) if owner else self._mix(id(tensor), version)
            return self._lose(path, _title(tensor) if owner is None else f"a view of {owner!r}")
        learnt = tensor.requires_grad and tensor.is_leaf
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().clone()
        whole = dense.contiguous()
        self._mix(learnt, whole.shape, whole.dtype)
        self._hash.update(bytes_of(whole))
        return ["tensor", is_begun, tensor.device.type, learnt, [*dense.stride()], whole]


class _Digest(pickle.Pickler):
    """Writes an object as pickle would; a part that pickle cannot store is written by its identity.

    Args:
        write: Receives bytes.
        named: The names of modules and weights by their id; they are not read.
        held: Receives the objects that have an identity alone, to keep them.
    """

    def __init__(self, write: Any, named: Mapping[int, str], held: list[Any]) -> None:
        super().__init__(SimpleNamespace(write=write), 4)
        self._named, self._held = named, held

    def persistent_id(self, value: Any) -> Any:
        if (name := self._named.get(id(value))) is not None:
            return name
        return self._identity(value) if is_skipped(value) else None

    def reducer_override(self, value: Any) -> Any:
        try:
            return value.__reduce_ex__(4)
        except Exception:  # of the object's own methods too
            return id, (self._identity(value),)

    def _identity(self, value: Any) -> int:
        self._held.append(value)
        return id(value)


class _MissingError(Exception):
    """The program does not have the object of a stored value any more."""


class _Restorer:
    """Makes values of nodes; fills objects that the fit has kept, so that all who hold them see the values.

    Args:
        objects: The objects of the program, by path.
        device: Receives the tensors that were not on a CPU.
    """

    def __init__(self, objects: dict[str, Any], task: nn.Module, device: torch.device) -> None:
        self._objects, self._device = {**objects, **_modules(task), **_weights(task)}, device

    def value(self, node: Node, path: str) -> Any:
        """Return the value of a node, for an attribute or a part of one."""
        if type(node) is not list:
            return node
        now = self._objects.get(path, _NONE)
        if node[0] in _CONTAINERS:
            made = self._container(path, now, *node)
        else:
            made = getattr(self, f"as_{node[0]}")(path, now, *node[1:])
        self._objects[path] = made
        return made

    def as_same(self, path: str, now: Any, other: str) -> Any:
        if other not in self._objects:
            raise _MissingError
        return self._objects[other]

    def as_tensor(
        self, path: str, now: Any, is_begun: bool, device: str, learnt: bool, strides: Any, stored: Tensor
    ) -> Tensor:
        made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)
        made = made.to(device if device == "cpu" else self._device)
        is_tensor = is_begun and isinstance(now, Tensor) and not now.is_inference()
        if is_tensor and (now.shape, now.dtype, now.device) == (made.shape, made.dtype, made.device):
            now.data.copy_(made)  # `data` hides it from autograd
            return now  # type: ignore[no-any-return]
        return made.requires_grad_(learnt)

    def as_array(self, path: str, now: Any, is_begun: bool, stored: Any) -> Any:
        is_array = is_begun and type(now) is np.ndarray and now.flags.writeable
        if is_array and (now.shape, now.dtype) == (stored.shape, stored.dtype):
            now[...] = stored
            return now
        return stored.copy()

    def as_generator(self, path: str, now: Any, node: Node) -> Any:
        if not isinstance(now, GENERATORS):
            raise _MissingError
        load_generator_state(now, self.value(node, f"{path}.state"))
        return now

    def as_state(self, path: str, now: Any, title: str, node: Node) -> Any:
        if _title(now) != title:
            raise _MissingError
        now.load_state_dict(self.value(node, f"{path}.state_dict()"))
        return now

    def _container(
        self, path: str, now: Any, name: str, is_begun: bool, keys: list[Any], nodes: list[Node]
    ) -> Any:
        kind = _CONTAINERS[name]
        if not is_begun or type(now) is not kind:
            if kind in _FILLED:
                raise _MissingError
            now = kind()
        self._objects[path] = now  # a part may refer to it
        names = zip(nodes, keys or range(len(nodes)), strict=True)
        parts = [self.value(node, f"{path}[{name!r}]") for node, name in names]
        if kind in (tuple, frozenset):
            return kind(parts)
        now.clear()
        if kind in _MAPPINGS:
            now |= dict(zip(keys, parts, strict=True))
        else:
            (now.update if kind is set else now.extend)(parts)
        return now


def _is_number(dtype: Any) -> bool:
    return dtype.isnative and getattr(torch, dtype.name, None) in CODES


def _is_key(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_key, value)))


def _title(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; of one without memory, a number of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, sharded or not made yet
        return -id(tensor)
