"""Which parts of a model are gathered and freed together."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from drivetrain.blocks import is_called, repeated_blocks, separate
from drivetrain.errors import ConfigError, nearest

Wrap = str | int | tuple[str, ...] | Callable[[nn.Module], bool]
"""How a user says it; see `FSDPConfig.wrap`."""


def units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """The modules that are gathered each by itself, inner ones before those that contain them.

    Raises:
        ConfigError: A class of which the model has none; lists the nearest. Or a container, such as a
            `ModuleList`.
    """
    if wrap == "auto":
        return repeated_blocks(model)
    if isinstance(wrap, (tuple, list)):
        chosen = _of_classes(model, wrap)
    elif isinstance(wrap, int):
        chosen = _by_size(model, wrap)
    else:
        assert callable(wrap)
        chosen = [each for each in model.modules() if each is not model and wrap(each)]
    for each in chosen:
        if not is_called(each):
            raise ConfigError(
                f"a {type(each).__name__} is never called itself, so that nothing would be gathered: wrap"
                " what is in it"
            )
    return separate(model, chosen[::-1])


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norms with weights of their own: these must have the dtype of the running means, while all
    other weights are gathered in the computing dtype.
    """
    kind = nn.modules.batchnorm._BatchNorm
    found = [
        each for each in model.modules() if isinstance(each, kind) and any(True for _ in each.parameters())
    ]
    return separate(model, found)


def _of_classes(model: nn.Module, names: tuple[str, ...] | list[str]) -> list[nn.Module]:
    present = {type(each).__name__ for each in model.modules()}
    for name in names:
        if name not in present:
            raise ConfigError(f"the model has no module of the class {name!r}. {nearest(name, present)}")
    return [each for each in model.modules() if each is not model and type(each).__name__ in names]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules that have as many parameters without those of units inside of them."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        if isinstance(module, nn.MultiheadAttention):
            # It uses an inner module's weights without calling it, and gives back a view, which torch warns
            # of: it belongs to the module around it.
            return sum(each.numel() for each in module.parameters())
        own = sum(each.numel() for each in module.parameters(recurse=False))
        own += sum(visit(child) for child in module.children())
        if module is not model and is_called(module) and own >= least:
            chosen.append(module)
            return 0
        return own

    visit(model)
    return chosen[::-1]
