"""The signature of a task's forward, and the call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


class Forward(NamedTuple):
    """The signature of a forward.

    Attributes:
        names: The parameters that can be given by name.
        required: Those of them without a default.
        positional: The parameters without a default that can be given by position.
        most: The largest number of a sequence's items, the target left out, that leaves no parameter in
            doubt.
        takes_all: Whether it takes `**`.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: tuple[str, ...]
    most: float
    takes_all: bool


FORWARDS: dict[type[nn.Module], Forward] = {}
"""Cached by class. `functools.lru_cache` would do, but torch.compile warns about it."""


def read_forward(kind: type[nn.Module]) -> Forward:
    """Inspect a class's forward and cache the result, so that compiled code finds it in the cache."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in parameters if p.kind in placed and p.default is p.empty]
    in_doubt = any(p.kind is p.VAR_POSITIONAL or p.default is not p.empty for p in parameters)
    most = len(positional) if in_doubt else math.inf
    if parameters and (not positional or not {*required} <= {*positional}):
        most = -math.inf  # a sequence has no names
    FORWARDS[kind] = found = Forward(
        tuple(p.name for p in named),
        tuple(required),
        tuple(positional),
        most,
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
