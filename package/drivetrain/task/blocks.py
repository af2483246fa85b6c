"""The repeated blocks of a model, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn


def repeated_blocks(model: nn.Module, tied: bool = False) -> list[nn.Module]:
    """Return the largest blocks that occur more than once in a list of modules, in model order.

    Args:
        model: The module to search.
        tied: Whether to include blocks that share a parameter with the rest of the model.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():  # outer ones first
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        children = list(module.children())
        kinds = Counter(type(each) for each in children if any(True for _ in each.parameters()))
        for child in children:
            composed = any(True for _ in child.children())
            if composed and kinds[type(child)] > 1 and is_called(child):
                found.append(child)
                inside.update(id(each) for each in child.modules())
    return found if tied else separate(model, found)


def is_called(module: nn.Module) -> bool:
    """Return whether a module may have a forward."""
    return (
        not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        or type(module).forward is not nn.Module.forward
    )


def separate(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that share no parameter with the rest of the model.

    Tied parameters must be gathered together.
    """
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(id(module))
    alone = []
    for module in modules:
        own = {id(each) for each in module.modules()}
        if all(users[id(parameter)] <= own for parameter in module.parameters()):
            alone.append(module)
    return alone
