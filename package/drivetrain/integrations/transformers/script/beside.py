"""Parameters that a script's optimizer trains besides its model's, such as the weights of a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError

_HOLDERS = (nn.Module, nn.Parameter, Mapping, list, tuple)


def has_beside(attributes: Mapping[str, Any], model: nn.Module) -> bool:
    """Return whether attributes of a script hold parameters that the model does not have."""
    of_model = set(map(id, model.parameters()))
    return any(id(each) not in of_model for value in attributes.values() for each in _parameters(value))


def modules_beside(attributes: Mapping[str, Any], model: nn.Module, optimizer: Any) -> nn.Module | None:
    """Return a module with all that an optimizer trains and the model does not have; None if that is nothing.

    Args:
        attributes: Those of the script, where it is found: modules and parameters, in mappings and lists too.
        model: The model.
        optimizer: The optimizer.

    Raises:
        ConfigError: A parameter is in no attribute.
    """
    if not isinstance(optimizer, Optimizer):
        return None
    of_model = set(map(id, model.parameters()))
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]} - of_model
    if not trained:
        return None
    found = nn.Module()
    for name, value in attributes.items():
        _add(found, name, value, of_model, trained)
    if missing := trained - set(map(id, found.parameters())):
        raise ConfigError(
            f"{len(missing)} parameters of the optimizer are neither in self.model nor in a module in an"
            " attribute of the Trainer, so no checkpoint would have them. Make the optimizer in"
            " create_optimizer, or give optimizer_cls_and_kwargs=(class, arguments)"
        )
    return found


def _add(found: nn.Module, name: str, value: Any, of_model: set[int], trained: set[int]) -> None:
    """Add what of a value is trained: a module whole, unless it also has parameters of the model."""
    own = set(map(id, _parameters(value)))
    if own.isdisjoint(trained):
        return
    name = name.replace(".", "_")
    if isinstance(value, nn.Parameter):
        found.register_parameter(name, value)
    elif isinstance(value, nn.Module) and own.isdisjoint(of_model):
        found.add_module(name, value)
    else:
        part = nn.Module()
        found.add_module(name, part)
        for key, each in _parts(value):
            _add(part, key, each, of_model, trained)


def _parameters(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, _HOLDERS):
        for _, each in _parts(value):
            if isinstance(each, (nn.Module, nn.Parameter)):
                yield from _parameters(each)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from value.named_children()
        yield from value.named_parameters(recurse=False)
    else:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        yield from ((str(key), each) for key, each in pairs)
