"""What a library has hooked onto modules, told apart from what was there before."""

from __future__ import annotations

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


class OwnHooks:
    """The hooks that a module has now.

    Args:
        module: Whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = {name: set(getattr(module, name)) for name in _HOOKS}

    def remove_others(self, package: str) -> None:
        """Take away what a package has added since; what a user has added stays."""
        module = self._module
        for name, own in self._own.items():
            hooks = getattr(module, name)
            for key in [each for each in hooks if each not in own and _is_of(package, hooks[each])]:
                del hooks[key]
                for flags in _FLAGS:
                    getattr(module, flags).pop(key, None)


def _is_of(package: str, hook: Any) -> bool:
    """Whether a hook is of a package, also as a partial function, a method or in torch's wrapping."""
    for name in ("hook", "func", "__func__"):
        hook = getattr(hook, name, hook)
    return f"{getattr(hook, '__module__', '')}.".startswith(f"{package}.")
