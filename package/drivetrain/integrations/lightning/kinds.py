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
    kind = _source(thing, name)
    if kind is None:
        return name in getattr(thing, "__dict__", ())
    return not is_theirs(kind) and kind.__module__.partition(".")[0] != "torch"


def has_hook(callback: Any, name: str) -> bool:
    """Return whether a callback of Lightning has its own hook in place of the one of its base, `Callback`."""
    kind = _source(callback, name)
    if kind is None:
        return name in vars(callback)
    return not (kind.__name__ == "Callback" and is_theirs(kind))


def _source(thing: Any, name: str) -> type | None:
    """Return the class that has an attribute; None for one that the object itself has.

    A method of a class that was assigned to the object, as by `self.val_dataloader = super().val_dataloader`,
    is that class's.
    """
    kinds = type(thing).__mro__
    if name not in getattr(thing, "__dict__", ()):
        return next((each for each in kinds if name in vars(each)), None)
    function = getattr(vars(thing)[name], "__func__", None)
    return next((each for each in kinds if function is not None and vars(each).get(name) is function), None)
