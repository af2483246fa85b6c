"""What a task's forward takes, as its signature says, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


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


def call_forward(task: nn.Module, inputs: Any) -> Any:
    """Call a task on what `inputs` returned: a mapping by name, a tuple by position, or the only argument."""
    kind = type(inputs)
    if kind is dict:
        return task(**inputs)
    if kind is tuple:
        return task(*inputs)
    if isinstance(inputs, Mapping):
        return task(**{str(name): value for name, value in inputs.items()})
    return task(inputs)
