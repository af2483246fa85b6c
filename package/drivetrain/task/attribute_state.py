"""State of a task that its state dict leaves out: what its attributes hold and a fit has changed.

A checkpoint of a run holds each attribute that differs from what it was when the fit began. A value becomes
a tree of lists, numbers, texts and tensors. A list begins with the name of a method of `_Restorer`, without
`as_`. A file can fill objects that the program has made. It can make containers, named tuples, data classes,
members of enums and random generators, and no other objects. It calls nothing of the user's but
`load_state_dict`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from drivetrain.checkpoint.format.tensors import CODES, bytes_of
from drivetrain.checkpoint.format.tree import pack
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.random_streams import generator_state, load_generator_state
from drivetrain.task.attributes import CODE, GENERATORS, OF_MODULES, is_opaque, modules_of

Node = Any
"""A value as a checkpoint holds it."""

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})

_MAPPINGS = (Counter, OrderedDict, defaultdict, dict)
_CONTAINERS: tuple[Any, ...] = (*_MAPPINGS, torch.Size, tuple, list, deque, set, frozenset)
"""Containers, derived classes before their bases."""

_FIXED = (tuple, frozenset, type(None))
"""Classes of values that cannot be filled."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

_NO_STATE = (*CODE, nn.Module)
"""Classes of attributes' values that are no state, or whose state is found elsewhere."""

_MOST = 200_000
"""The most lists and tensors that the attributes of all ranks may have in a checkpoint."""

_NONE = object()


class AttributeState:
    """The attributes of a task that differ from what they were when a fit began.

    Args:
        task: The task, prepared by its strategy, before anything of a checkpoint is restored.
        ranks: The number of ranks that save together.

    Attributes:
        lost: The attributes that have changed and cannot be stored, with their types.
    """

    def __init__(self, task: nn.Module, ranks: int = 1) -> None:
        self.lost: dict[str, str] = {}
        self._task, self._most = task, _MOST // ranks
        self._restored, self._told = set[str](), set[str]()
        writer = _Writer(task)
        self._marks = {name: each.mark for name, each in writer.attributes()}
        self._began = {place: (id(each), type(each)) for place, each in writer.objects.items()}

    def state(self) -> tuple[dict[str, Node], dict[str, Any]]:
        """Return the attributes that have changed, and a mark of each, which is equal for equal values."""
        self.lost, left = {}, self._most
        nodes, marks = dict[str, Node](), dict[str, Any](dict.fromkeys(self._marks))
        for name, each in _Writer(self._task, self._began).attributes():
            marks[name] = each.mark
            if each.mark == self._marks.get(name, _NONE) and name not in self._restored:
                continue
            if each.cannot or each.parts > left:
                self.lost[name] = each.cannot or f"{each.parts} lists and tensors"
            else:
                left -= each.parts
                nodes[name] = each.node
        for name in [name for name, mark in marks.items() if mark is None]:
            if (now := _attribute_of(self._task, name)) is None:
                nodes[name] = ["gone"]
            else:  # code, a class or a module has taken its place
                self.lost[name] = _title(type(now))
        return nodes, {name: marks[name] for name in nodes}

    def news(self) -> dict[str, str]:
        """Return what is lost and was not in an earlier result of this method."""
        new = {name: kind for name, kind in self.lost.items() if name not in self._told}
        self._told |= new.keys()
        return new

    def load(self, state: Mapping[str, Node], device: torch.device) -> list[str]:
        """Restore attributes; return those that the program has no place for any more.

        Args:
            device: Receives the tensors that were not on a CPU.
        """
        reader, missing = _Restorer(self._task, device), []
        for name, node in state.items():
            prefix, _, key = name.rpartition(".")
            module = reader.modules.get(prefix)
            try:
                if module is None or key in OF_MODULES:
                    raise _MissingError
                tables = (module._parameters, module._buffers, vars(module))
                table = next((each for each in tables if key in each), tables[-1])
                if node == ["gone"]:
                    table.pop(key, None)
                elif node != ["begun"]:
                    table[key] = reader.value(node, name)
                self._restored.add(name)
            except _MissingError:
                missing.append(name)
        return missing


def merged(states: Sequence[tuple[dict[str, Node], dict[str, Any]]]) -> list[dict[str, Node]]:
    """Return what a checkpoint holds of each rank: all of the first's, and what differs on the others."""
    first, marks = states[0]
    of_ranks = [first]
    for nodes, own in states[1:]:
        differing = {name: node for name, node in nodes.items() if own[name] != marks.get(name, _NONE)}
        of_ranks.append(differing | {name: ["begun"] for name in first.keys() - nodes.keys()})
    return of_ranks


def _attribute_of(task: nn.Module, name: str) -> Any:
    """Return an attribute by its full name; None if there is none."""
    prefix, _, key = name.rpartition(".")
    module = _modules(task).get(prefix)
    tables = () if module is None else (module._parameters, module._buffers, module._modules, vars(module))
    return next((each[key] for each in tables if key in each), None)


def _modules(task: nn.Module) -> dict[str, nn.Module]:
    return {clean_name(prefix.rstrip(".")): module for prefix, module in modules_of(task)}


def _weights(task: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that are among a checkpoint's weights."""
    names = {clean_name(name) for name in task.state_dict()}
    all_names = *task.named_parameters(remove_duplicate=False), *task.named_buffers(remove_duplicate=False)
    return {clean: each for name, each in all_names if (clean := clean_name(name)) in names}


@dataclasses.dataclass(slots=True)
class _Attribute:
    """An attribute's value.

    Attributes:
        node: The value.
        mark: Equal for equal values.
        parts: The number of its lists and tensors.
        cannot: The type of a part that cannot be stored, or "".
    """

    node: Node
    mark: Any
    parts: int = 0
    cannot: str = ""


class _Writer:
    """Makes trees of a task's attributes.

    Args:
        began: The id and class of each object when the fit began, by its place; None if it begins now.

    Attributes:
        objects: What the attributes hold, by place.
    """

    def __init__(self, task: nn.Module, began: Mapping[str, tuple[int, type]] | None = None) -> None:
        self.objects: dict[str, Any] = {}
        self._task, self._began, self._cannot = task, began, ""
        self._modules = {id(each): name for name, each in _modules(task).items()}
        weights = _weights(task)
        self._weights = {id(each): name for name, each in weights.items()}
        self._storages = {_storage(each): name for name, each in weights.items()}
        self._places: dict[int, str] = {}

    def attributes(self) -> Iterator[tuple[str, _Attribute]]:
        """Yield what may be state, by full name."""
        for prefix, module in _modules(self._task).items():
            prefix = f"{prefix}." if prefix else ""
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None and id(tensor) not in self._weights:
                        yield prefix + key, self._attribute(tensor, prefix + key)
            for key, value in vars(module).items() if not is_opaque(module) else ():
                # torch's weight_norm, spectral_norm and pruning compute the tensor in each forward.
                is_state = key not in OF_MODULES and not isinstance(value, _NO_STATE)
                if is_state and {f"{key}_g", f"{key}_orig"}.isdisjoint(module._parameters):
                    yield prefix + key, self._attribute(value, prefix + key)

    def _attribute(self, value: Any, name: str) -> _Attribute:
        if type(value) in _PLAIN:
            return _Attribute(value, [type(value).__name__, repr(value)])
        self._cannot = ""
        try:
            node = self._node(value, name)
            packed, tensors = pack(node)
        except Exception:  # too deep, in use by a thread, or of a class whose own methods fail
            return _Attribute(None, id(value), cannot=self._cannot or _path(type(value)))
        text = json.dumps(packed)
        hashed = xxhash.xxh3_128(text.encode())
        for each in tensors.values():
            hashed.update(f"{each.dtype} {tuple(each.shape)}".encode())
            hashed.update(bytes_of(each.contiguous().reshape(-1)))
        parts = text.count("[") + text.count("{") + 3 * len(tensors)
        return _Attribute(node, hashed.hexdigest(), parts, self._cannot)

    def _node(self, value: Any, place: str) -> Node:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, np.generic):
            return value
        if kind is complex:
            return ["complex", value.real, value.imag]
        known, before = (id(value), kind) if self._began is None else self._began.get(place, (0, None))
        is_new, is_like = known != id(value), before is kind
        self.objects[place] = value  # so that its id stays its own
        if not isinstance(value, tuple):
            if id(value) in self._places:
                return ["same", self._places[id(value)], is_new]
            self._places[id(value)] = place
        if isinstance(value, Tensor):
            return self._tensor(value, is_new)
        if kind is np.ndarray and value.dtype.kind in "biufc":
            return ["array", is_new, value]
        if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            device = value.device.type if isinstance(value, torch.Generator) else "cpu"
            return ["generator", is_new, device, self._node(generator_state(value), f"{place}.state")]
        if isinstance(value, _CONTAINERS):
            return self._container(value, place, is_new, is_like)
        return self._other(value, place, is_new, is_like)

    def _tensor(self, tensor: Tensor, is_new: bool) -> Node:
        if id(tensor) in self._weights:
            return ["weight", self._weights[id(tensor)]]
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or tensor.dtype not in CODES:
            return self._kept(tensor, False, -1 if tensor.is_inference() else tensor._version)
        if (name := self._storages.get(_storage(tensor))) is not None:
            return ["weight", name, list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        values = tensor.detach()
        is_dense = torch.empty_like(values, device="meta").stride() == values.stride()
        strides = list(values.stride()) if is_dense and not values.is_contiguous() else None
        learnt = tensor.requires_grad and tensor.is_leaf
        plain = values.cpu().resolve_conj().resolve_neg()
        return ["tensor", is_new, values.device.type, learnt, strides, plain]

    def _container(self, value: Any, place: str, is_new: bool, is_like: bool) -> Node:
        kind, base = type(value), next(each for each in _CONTAINERS if isinstance(value, each))
        entries, keys = [*value], None
        if issubclass(base, dict):
            keys, entries = [self._key(each, place) for each in entries], [*value.values()]
        if not {*map(type, entries)} <= _PLAIN:
            names = range(len(entries)) if keys is None else map(repr, value)
            entries = [self._node(each, f"{place}.{name}") for each, name in zip(entries, names, strict=True)]
        if issubclass(kind, tuple) and _class(_path(kind)) is kind and hasattr(kind, "_fields"):
            return ["named", _path(kind), entries]
        can_be_made = kind is base is not defaultdict
        if not can_be_made and not is_like:
            return self._kept(value, False)
        is_new = is_new and can_be_made and not issubclass(base, _FIXED)
        most = value.maxlen if base is deque else None
        return ["container", base.__name__, is_new, keys, entries, most]

    def _key(self, key: Any, place: str) -> Node:
        is_plain = type(key) in _PLAIN or isinstance(key, (tuple, Enum, np.generic))
        return self._node(key, f"{place}[{key!r}]") if is_plain else self._kept(key, False)

    def _other(self, value: Any, place: str, is_new: bool, is_like: bool) -> Node:
        path, is_module = _path(type(value)), isinstance(value, nn.Module)
        is_known = _class(path) is type(value)
        if is_module and id(value) in self._modules:
            return ["module", self._modules[id(value)]]
        if isinstance(value, Enum):
            return ["enum", path, value.name] if is_known else self._kept(value, is_like, value.name)
        if isinstance(value, (int, float, str, bytes)):
            return self._kept(value, False, repr(value))
        can_be_made = is_known and dataclasses.is_dataclass(value)
        if is_opaque(value) or not (is_like or can_be_made):
            return self._kept(value, is_like)
        if not is_module and _is_stateful(type(value)):
            return ["state", path, self._node(value.state_dict(), f"{place}.state_dict")]
        parts = [*_parts(value).items()]
        nodes = [self._node(each, f"{place}.{name}") for name, each in parts]
        return ["object", is_new and not is_module, path, [name for name, _ in parts], nodes]

    def _kept(self, value: Any, is_like: bool, token: Any = None) -> Node:
        """Return the node of what stays as the program makes it; what is new or has changed is lost."""
        if not is_like:
            self._cannot = self._cannot or _title(type(value))
        return ["kept", [id(value), token] if token is not None else is_like]


class _MissingError(Exception):
    """The program has no place for a stored value any more."""


class _Restorer:
    """Makes values of nodes, and fills what was there when the fit began with what the fit has left there."""

    def __init__(self, task: nn.Module, device: torch.device) -> None:
        writer = _Writer(task)
        for _ in writer.attributes():
            pass
        self._objects, self._weights, self._device = writer.objects, _weights(task), device
        self.modules = _modules(task)

    def value(self, node: Node, place: str) -> Any:
        """Return the value of a node, for an attribute or a part of one."""
        if type(node) is not list:
            return node
        made = getattr(self, f"as_{node[0]}")(place, self._objects.get(place, _NONE), *node[1:])
        self._objects[place] = made
        return made

    def as_complex(self, place: str, now: Any, real: float, imaginary: float) -> complex:
        return complex(real, imaginary)

    def as_same(self, place: str, now: Any, other: str, is_new: bool) -> Any:
        return self.as_kept(place, self._objects.get(other, _NONE), None)

    def as_kept(self, place: str, now: Any, token: Any) -> Any:
        if now is _NONE:
            raise _MissingError
        return now

    def as_weight(self, place: str, now: Any, name: str, *view: Any) -> Any:
        weight = self.as_kept(place, self._weights.get(name, _NONE), None)
        return weight.detach().as_strided(*view) if view else weight

    def as_module(self, place: str, now: Any, name: str) -> Any:
        return self.as_kept(place, self.modules.get(name, _NONE), None)

    def as_tensor(
        self, place: str, now: Any, is_new: bool, device: str, learnt: bool, strides: Any, stored: Tensor
    ) -> Tensor:
        made = stored.clone()
        if strides is not None:
            made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype).copy_(stored)
        made = made.to(device if device == "cpu" else self._device)
        fits = isinstance(now, Tensor) and (now.dtype, now.device.type) == (made.dtype, made.device.type)
        if is_new or not fits or now.is_inference():
            return made.requires_grad_(learnt)
        if (now.shape, now.stride()) == (made.shape, made.stride()):
            now.data.copy_(made)  # `data` hides it from autograd
        else:
            now.data = made
        return now  # type: ignore[no-any-return]

    def as_array(self, place: str, now: Any, is_new: bool, stored: Any) -> Any:
        if is_new or type(now) is not np.ndarray or (now.shape, now.dtype) != (stored.shape, stored.dtype):
            return stored.copy()
        if not now.flags.writeable:
            return stored.copy()
        now[...] = stored
        return now

    def as_generator(self, place: str, now: Any, is_new: bool, device: str, node: Node) -> Any:
        state = self.value(node, f"{place}.state")
        if is_new or not isinstance(now, GENERATORS):
            if isinstance(state, Tensor):
                now = torch.Generator("cpu" if device == "cpu" else self._device)
            elif "words" in state:
                now = random.Random()
            elif (name := state["bit_generator"]) in _BIT_GENERATORS:
                now = np.random.Generator(getattr(np.random, name)())
        load_generator_state(self.as_kept(place, now, None), state)
        return now

    def as_container(
        self, place: str, now: Any, name: str, is_new: bool, keys: Any, nodes: list[Node], most: Any
    ) -> Any:
        base = next(each for each in _CONTAINERS if each.__name__ == name)
        if not issubclass(base, _FIXED):
            if is_new or not isinstance(now, base):
                now = deque(maxlen=most) if base is deque else base()
            self._objects[place] = now  # a part may refer to it
        made = None if keys is None else [self.value(each, f"{place}[{each!r}]") for each in keys]
        labels = range(len(nodes)) if made is None else map(repr, made)
        parts = [self.value(node, f"{place}.{each}") for node, each in zip(nodes, labels, strict=True)]
        if issubclass(base, _FIXED):
            return base(parts)
        base.clear(now)
        if made is None:
            (base.update if base is set else base.extend)(now, parts)
        else:
            for key, each in zip(made, parts, strict=True):
                base.__setitem__(now, key, each)
        return now

    def as_named(self, place: str, now: Any, path: str, nodes: list[Node]) -> Any:
        kind = _class(path)
        if kind is None or not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
            raise _MissingError
        parts = [self.value(node, f"{place}.{number}") for number, node in enumerate(nodes)]
        return tuple.__new__(kind, parts)

    def as_enum(self, place: str, now: Any, path: str, name: str) -> Any:
        kind = _class(path)
        is_enum = kind is not None and issubclass(kind, Enum)
        return self.as_kept(place, kind.__members__.get(name, _NONE) if is_enum else _NONE, None)

    def as_state(self, place: str, now: Any, path: str, node: Node) -> Any:
        if _path(type(now)) != path:
            raise _MissingError
        now.load_state_dict(self.value(node, f"{place}.state_dict"))
        return now

    def as_object(
        self, place: str, now: Any, is_new: bool, path: str, names: list[str], nodes: list[Node]
    ) -> Any:
        if is_new or _path(type(now)) != path:
            # Another object than the one of the start, which others may hold.
            kind = type(now) if _path(type(now)) == path else _class(path)
            if kind is not type(now) and not dataclasses.is_dataclass(kind):
                raise _MissingError
            now = object.__new__(kind)
        self._objects[place] = now  # a part may refer to it
        for name, node in zip(names, nodes, strict=True):
            object.__setattr__(now, name, self.value(node, f"{place}.{name}"))  # also of a frozen one
        return now


def _parts(value: Any) -> dict[str, Any]:
    """Return the parts of an object, by name."""
    state: Any = object.__getstate__(value) or {}
    parts = {**(state[0] or {}), **state[1]} if isinstance(state, tuple) else state
    tables = ("_parameters", "_buffers", "_modules") if isinstance(value, nn.Module) else OF_MODULES
    return {name: each for name, each in parts.items() if name in tables or name not in OF_MODULES}


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_stateful(kind: type) -> bool:
    # Asked of the class: an attribute that an object makes on request is no method of it.
    return all(callable(getattr(kind, each, None)) for each in ("state_dict", "load_state_dict"))


def _title(kind: type) -> str:
    return _path(kind).replace(":", ".").removeprefix("builtins.")


def _class(path: str) -> Any:
    """Return a class that the program has loaded, or None; nothing is imported or called."""
    module, _, names = path.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) else None


def _storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; of one without memory, a number of its own."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, sharded or not made yet
        return -id(tensor)
