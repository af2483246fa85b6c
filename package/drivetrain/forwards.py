"""What a task's forward takes, as its signature says, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as _modules


class Forward(NamedTuple):
    """What a forward's signature says: its parameters, those without a default, how many are positional, and
    `**`.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: int
    takes_all: bool


FORWARDS: dict[type[nn.Module], Forward] = {}
"""Of the classes that have been asked for; no `functools.lru_cache`, which torch.compile warns of."""


def read_forward(kind: type[nn.Module]) -> Forward:
    """Look at a class's forward, once; what is compiled finds it looked at."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    FORWARDS[kind] = found = Forward(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        1_000_000 if star else len(positional),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    return found


def names_by_position(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of what a class's forward takes, where it needs all of it and takes it by position.

    Else none. By its code: what decorates a function shows that one's signature, and may take less.
    """
    function, read = kind.forward, FORWARDS.get(kind) or read_forward(kind)
    if type(function) is not FunctionType:
        return ()
    taken = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    return taken if taken == read.names == read.required and not read.takes_all else ()


_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(task: nn.Module) -> bool:
    """Whether all that calling a module does is to call its forward: without hooks, and not compiled."""
    return (
        type(task).__call__ is _CALL
        and type(task)._call_impl is _CALL_IMPL
        and task._compiled_call_impl is None
        and not any(getattr(task, each) or getattr(_modules, f"_global{each}") for each in _HOOKS)
    )


def call_forward(task: nn.Module, inputs: Any) -> Any:
    """`task(...)` on what `inputs` returned: a mapping by name, a tuple by position, or the only argument."""
    # Where `is_plain`, which is written out, as it is called for every batch: nn.Module's call takes 0.7 us.
    if (
        type(task).__call__ is not _CALL
        or type(task)._call_impl is not _CALL_IMPL
        or task._compiled_call_impl is not None
        or task._forward_pre_hooks
        or task._forward_hooks
        or task._backward_pre_hooks
        or task._backward_hooks
        or _modules._global_forward_pre_hooks
        or _modules._global_forward_hooks
        or _modules._global_backward_pre_hooks
        or _modules._global_backward_hooks
    ):
        forward: Callable[..., Any] = task
    else:
        forward = task.forward
    kind = type(inputs)
    if kind is dict:
        return forward(**inputs)
    if kind is tuple:
        return forward(*inputs)
    if isinstance(inputs, Mapping):
        return forward(**{str(name): value for name, value in inputs.items()})
    return forward(inputs)
