"""Parameters that are not sharded: every process keeps them whole."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from drivetrain.errors import ConfigError, nearest


def ignored_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters that patterns name, or that modules have which patterns name.

    Raises:
        ConfigError: A pattern that names none; lists the nearest.
    """
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    modules = [
        name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
    ]
    chosen: set[str] = set()
    for pattern in patterns:
        holders = tuple(f"{name}." for name in modules if fnmatchcase(name, pattern))
        found = {name for name in parameters if fnmatchcase(name, pattern) or name.startswith(holders)}
        if not found:
            raise ConfigError(
                f"ignored={pattern!r} names no parameter, and no module that has one."
                f" {nearest(pattern, {*parameters, *modules})}"
            )
        chosen |= found
    return frozenset(chosen)


def named(model: nn.Module, names: frozenset[str]) -> set[nn.Parameter]:
    """The parameters that bear these names now."""
    if not names:
        return set()
    return {each for name, each in model.named_parameters(remove_duplicate=False) if name in names}
