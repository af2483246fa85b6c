"""What a task's forward takes, as its signature says, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as _modules


class Forward(NamedTuple):
    """What a forward's signature says.

    Attributes:
        names: Its parameters that can be passed by name.
        required: Those of them without a default.
        positional: How many can be passed by position.
        takes_all: Whether it has a `**`.
        columns: Takes from a dict what it is called with, by position: of one parameter that one, of several
            a tuple. None where that depends on the dict, or where not all of it can be passed so.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: int
    takes_all: bool
    columns: Callable[[dict[str, Any]], Any] | None


FORWARDS: dict[type[nn.Module], Forward] = {}
"""Of the classes that have been asked for; no `functools.lru_cache`, which torch.compile warns of."""


def read_forward(kind: type[nn.Module]) -> Forward:
    """Look at a class's forward, once; what is compiled finds it looked at."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    # What decorates a function shows its signature, and may take less than that says.
    plain = type(kind.forward) is FunctionType and not hasattr(kind.forward, "__wrapped__")
    simple = all(p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in parameters)
    FORWARDS[kind] = found = Forward(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        1_000_000 if star else len(positional),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        itemgetter(*(p.name for p in named)) if named and plain and simple else None,
    )
    return found


_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl


def is_plain(task: nn.Module) -> bool:
    """Whether all that calling a module does is to call its forward: without hooks, and not compiled."""
    kind, own = type(task), task.__dict__
    return not (
        kind.__call__ is not _CALL
        or kind._call_impl is not _CALL_IMPL
        or task._compiled_call_impl is not None
        or own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or _modules._global_forward_pre_hooks
        or _modules._global_forward_hooks
        or _modules._global_backward_pre_hooks
        or _modules._global_backward_hooks
    )


def call_forward(task: nn.Module, inputs: Any) -> Any:
    """`task(...)` on what `inputs` returned: a mapping by name, a tuple by position, or the only argument."""
    # nn.Module's own call takes 0.7 us in every batch.
    forward: Callable[..., Any] = task.forward if is_plain(task) else task
    kind = type(inputs)
    if kind is dict:
        return forward(**inputs)
    if kind is tuple:
        return forward(*inputs)
    if isinstance(inputs, Mapping):
        return forward(**{str(name): value for name, value in inputs.items()})
    return forward(inputs)
