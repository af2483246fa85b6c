"""Objects of Lightning, recognised by the names of their classes: neither of its two packages is imported."""

from __future__ import annotations

from typing import Any

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def is_kind(thing: object, *names: str) -> bool:
    """Return whether one of an object's classes is Lightning's class of one of these names."""
    return any(each.__name__ in names and is_theirs(each) for each in type(thing).__mro__)


def is_theirs(kind: type) -> bool:
    """Return whether a class is Lightning's; its demonstrations count as a user's."""
    package, *rest = kind.__module__.split(".")
    return package in PACKAGES and "demos" not in rest


def is_overridden(thing: Any, name: str) -> bool:
    """Return whether an object, or a user's class of it, has its own attribute in place of Lightning's."""
    if thing is None:
        return False
    if name in vars(thing):
        return True
    kind = next((each for each in type(thing).__mro__ if name in vars(each)), None)
    return kind is not None and not is_theirs(kind) and kind.__module__.partition(".")[0] != "torch"


def has_hook(callback: Any, name: str) -> bool:
    """Return whether a callback of Lightning has its own hook in place of the one of its base, `Callback`."""
    if name in vars(callback):
        return True
    kind = next((each for each in type(callback).__mro__ if name in vars(each)), None)
    return kind is not None and not (kind.__name__ == "Callback" and is_theirs(kind))
