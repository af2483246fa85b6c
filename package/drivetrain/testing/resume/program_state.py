"""The state of a program's objects, read by walking through the task, the data, callbacks and modules."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from drivetrain.task.task import TaskModule
from drivetrain.testing.resume.digests import ends, leaf_text

_DEPTH = 12
_ENTRIES = 20_000

_INSTALLED = tuple(
    str(Path(sysconfig.get_paths()[each])) for each in ("stdlib", "platstdlib", "purelib", "platlib")
)
_MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), *vars(TaskModule()), "_hparams"})
"""Attributes that torch and this package set on every module."""

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}

_OURS = ("drivetrain", "torch", "numpy", "__mp_main__")


def is_program_module(module: str | None) -> bool:
    """Return whether a module belongs to the program rather than to Python or an installed package."""
    if not module or module.split(".")[0] in _OURS:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and not _is_installed(file)


@functools.cache  # called for every loaded module after every update
def _is_installed(file: str) -> bool:
    return str(Path(file).absolute()).startswith(_INSTALLED)


@functools.cache
def _imported_by(module: str) -> tuple[str, ...]:
    """Return the modules that a module's source imports, in its functions too, with all their parents."""
    found = sys.modules[module]
    try:
        tree = ast.parse(Path(str(found.__file__)).read_bytes())
    except (OSError, SyntaxError, ValueError):  # there is no source, as for an extension module
        return ()
    names = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative to the module's package, or to one above
                above = (found.__package__ or "").split(".")
                base = ".".join([*above[: len(above) - node.level + 1], base]).rstrip(".")
            names += [base, *(f"{base}.{each.name}" for each in node.names)]  # each may be a module itself
    parts = [name.split(".") for name in names]
    return tuple(dict.fromkeys(".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)))


class ProgramState:
    """The values that a program's objects hold at one moment.

    Args:
        known: Objects to pass over because they are compared elsewhere, such as the task's parameters.

    Attributes:
        texts: The text of each value by its place, in the order of the walk.
    """

    def __init__(self, known: list[Any]) -> None:
        self.texts: dict[str, str] = {}
        self._seen = {id(each): each for each in known}  # the reference keeps an id from being reused
        self._program_modules: dict[str, bool] = {}
        self._reached: dict[str, None] = {}

    def add(self, name: str, value: Any, whole: bool = False) -> None:
        """Walk through a value and all that it refers to.

        Args:
            name: The place of the value.
            value: Any object.
            whole: Whether to walk through it even if its class is not the program's.
        """
        self._walk(name, value, 0, whole)

    def add_callback(self, callback: Any) -> None:
        """Walk through a callback.

        Attributes that this package's classes set are passed over: they are saved, or measured again.
        """
        name = "" if _is_ours(type(callback)) else f" {type(callback).__name__}"
        library_attributes = {
            each for kind in type(callback).__mro__ if _is_ours(kind) for each in _names_in_methods(kind)
        }
        self._seen[id(callback)] = callback
        for place, each in self._inside_object(callback):
            if place.removeprefix(".") not in library_attributes:
                self._walk(f"callback{name}{place}", each, 1)

    def add_modules(self, begin: str | None = None) -> None:
        """Walk through the variables of the program's modules.

        Args:
            begin: The module to begin with. Only modules that it imports, directly or not, and those of the
                objects that are walked through are taken. None takes all modules of the program.
        """
        for name in list(sys.modules) if begin is None else [begin]:
            self._reach(name)
        walked: set[str] = set()
        while left := [name for name in self._reached if name not in walked]:
            for name in left:
                walked.add(name)
                for key, value in list(vars(sys.modules[name]).items()):
                    if not key.startswith("__") and not isinstance(value, types.ModuleType):
                        self._walk(f"{name}.{key}", value, 0)
                for each in () if begin is None else _imported_by(name):
                    self._reach(each)

    def _reach(self, module: str) -> None:
        if self._is_program_module(module) and isinstance(sys.modules[module], types.ModuleType):
            self._reached[module] = None

    def _is_program_module(self, module: str | None) -> bool:
        found = self._program_modules.get(module or "")
        if found is None:
            found = self._program_modules[module or ""] = is_program_module(module)
        return found

    def _walk(self, path: str, value: Any, depth: int, whole: bool = False) -> None:
        if depth > _DEPTH or len(self.texts) >= _ENTRIES:
            return
        fixed = isinstance(value, (bool, int, float, complex, str, bytes, type(None)))
        if not fixed:
            if id(value) in self._seen:
                return
            self._seen[id(value)] = value
            named = value if isinstance(value, (types.FunctionType, type)) else type(value)
            self._reach(named.__module__)
        text = leaf_text(value)
        if text is not None:
            self.texts[path] = text
            return
        for name, each in self._inside(value, whole):
            self._walk(f"{path}{name}", each, depth + 1)

    def _inside(self, value: Any, whole: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            yield " length", len(value)
            yield from ((f"[{key!r}]", value[key]) for key in ends(value))
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            yield " length", len(value)
            yield from ((f"[{index}]", each) for index, each in enumerate(ends(value)))
        elif isinstance(value, nn.Module):
            yield from self._inside_module(value, whole)
        elif isinstance(value, Optimizer):
            yield ".state", list(value.state_dict()["state"].values())
        elif isinstance(value, functools.partial):
            yield from (("'s function", value.func), ("'s arguments", (value.args, value.keywords)))
        elif isinstance(value, types.MethodType):
            yield "'s object", value.__self__
        elif isinstance(value, types.FunctionType):
            if self._is_program_module(value.__module__):
                yield from _inside_function(value)
        elif isinstance(value, type):
            if self._is_program_module(value.__module__):
                yield from _attributes(vars(value), _can_hold_state)
        elif isinstance(value, DataLoader):
            for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "generator"):
                yield f".{name}", getattr(value, name)
        elif whole or self._is_program_module(type(value).__module__) or _is_torch_data(value):
            yield from self._inside_object(value)

    def _inside_module(self, module: nn.Module, whole: bool) -> Iterator[tuple[str, Any]]:
        for kind in (module._parameters, module._buffers):
            yield from ((f".{name}", each) for name, each in kind.items() if each is not None)
        if whole or self._is_program_module(type(module).__module__):
            yield from _attributes(vars(module), lambda _: True, _MODULE_ATTRIBUTES)
        for attribute, word in _HOOKS.items():
            hooks = getattr(module, attribute).values()
            yield from ((f"'s {word} {number}", each) for number, each in enumerate(hooks))
        yield from ((f".{name}", each) for name, each in module._modules.items() if each is not None)

    def _inside_object(self, value: Any) -> Iterator[tuple[str, Any]]:
        yield from _attributes(getattr(value, "__dict__", {}), lambda _: True)
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield f".{name}", getattr(value, name)


def _inside_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" with {name}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from ((f"'s default {name}", each) for name, each in zip(names[::-1], defaults[::-1], strict=False))
    yield from ((f"'s default {name}", each) for name, each in (function.__kwdefaults__ or {}).items())
    yield from _attributes(vars(function), lambda _: True)


def _attributes(
    found: Mapping[str, Any], keep: Callable[[Any], bool], without: frozenset[str] = frozenset()
) -> Iterator[tuple[str, Any]]:
    for name, each in list(found.items()):
        if not name.startswith("__") and name not in without and keep(each):
            yield f".{name}", each


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("drivetrain.")


@functools.cache
def _names_in_methods(kind: type) -> frozenset[str]:
    """Return the attributes that a class's methods name: those that they set, and a few more."""
    methods = (each for each in vars(kind).values() if isinstance(each, types.FunctionType))
    return frozenset(name for each in methods for name in each.__code__.co_names)


def _can_hold_state(value: Any) -> bool:
    """Return whether a class attribute can hold state: a value, or a method with mutable defaults."""
    return isinstance(value, types.FunctionType) or not (callable(value) or _is_member(value))


def _is_member(value: Any) -> bool:
    return inspect.isdatadescriptor(value) or isinstance(value, (classmethod, staticmethod))


def _is_torch_data(value: Any) -> bool:
    return type(value).__module__.startswith("torch.utils.data")
