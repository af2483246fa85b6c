"""The arguments of a task's constructor: recorded when it is called, and passed again on a rebuild."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from torch import nn

from drivetrain.core.errors import ConfigError

T = TypeVar("T")


def parameters_of(cls: type[nn.Module]) -> tuple[inspect.Parameter, ...]:
    """Return a constructor's parameters without `self`; none if the class defines no constructor."""
    if cls.__init__ is nn.Module.__init__:  # its signature has *args and **kwargs, but it takes none
        return ()
    return _parameters_but_self(cls.__init__)


@cache  # every save asks
def _parameters_but_self(method: Callable[..., None]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(method).parameters.values())[1:]


def record_arguments(
    cls: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a constructor call by name, with defaults; None if the call does not fit.

    Containers are copied, because the constructor may later change a list that it was given.
    """
    parameters = parameters_of(cls)
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    values = dict(bound.arguments)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(values.pop(parameter.name, {}))
    return {name: _containers_copied(each) for name, each in values.items()}


def _containers_copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _containers_copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_containers_copied(each) for each in value)
    return value


def construct(cls: type[T], arguments: Mapping[str, Any], where: str) -> T:
    """Return a task built from its recorded arguments."""
    signature = inspect.Signature(parameters_of(cls))  # type: ignore[arg-type]
    named = {name: arguments[name] for name in signature.parameters if name in arguments}
    others = {name: value for name, value in arguments.items() if name not in named}
    for each in signature.parameters.values():
        if each.kind is each.VAR_KEYWORD:
            named[each.name], others = others, {}
    bound = inspect.BoundArguments(signature, named)
    bound.apply_defaults()
    try:
        signature.bind(*bound.args, **bound.kwargs, **others)
    except TypeError as error:
        raise ConfigError(
            f"{cls.__name__}{signature} does not take the arguments of {where}: {error}. It was"
            " saved by another task, or by an earlier version of this one; its arguments are"
            f" {', '.join(map(repr, arguments)) or 'none'}"
        ) from None
    return cls(*bound.args, **bound.kwargs)
