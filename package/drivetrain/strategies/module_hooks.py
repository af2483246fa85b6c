"""Removing the hooks that a library has added to a module, and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class HookSnapshot:
    """The hooks that a module had at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {name: set(getattr(module, name)) for name in _HOOKS}

    def remove_others(self, package: str) -> None:
        """Remove the hooks that a package has added since; keep those that a user has added."""
        _remove(self._module, package, self._own)


@contextmanager
def without_hooks(modules: Iterable[nn.Module], packages: Collection[str]) -> Iterator[None]:
    """Run the block without the hooks that these packages have added to modules."""
    modules = list(modules)
    tables = [getattr(each, name) for each in modules for name in (*_HOOKS, *_FLAGS)]
    before = [dict(each) for each in tables]
    for each in modules:
        for package in packages:
            _remove(each, package, {})
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            added = dict(table)
            table.clear()
            table.update({**kept, **added})  # in their order


def _remove(module: nn.Module, package: str, kept: Mapping[str, Collection[int]]) -> None:
    for name in _HOOKS:
        hooks = getattr(module, name)
        for key in [
            each for each in hooks if _is_of(package, hooks[each]) and each not in kept.get(name, ())
        ]:
            del hooks[key]
            for flags in _FLAGS:
                getattr(module, flags).pop(key, None)


def _is_of(package: str, hook: Any) -> bool:
    """Return whether a hook is defined in a package; looks through partials, methods and torch's wrapper."""
    for name in ("hook", "func", "__func__"):
        hook = getattr(hook, name, hook)
    return f"{getattr(hook, '__module__', '')}.".startswith(f"{package}.")
