"""The optional methods of a user's data: its state, its length and its epoch."""

from __future__ import annotations

import inspect
from typing import Any

from drivetrain.core.types import Stateful


def has_state(data: object) -> bool:
    """Return whether data has a state that can be stored without knowing more about it."""
    if not isinstance(data, Stateful):
        return False
    try:
        inspect.signature(data.state_dict).bind()
        inspect.signature(data.load_state_dict).bind({})
    except TypeError:
        return False
    except ValueError:  # a function without a signature, such as one of an extension module
        pass
    return True


def length_of(data: Any) -> int | None:
    """Return the length of data or of a sampler; None if it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def order_settings(data: object) -> str | None:
    """Return what the order of data depends on, as text; None if the data does not say so."""
    call = getattr(data, "order_settings", None)
    return str(call()) if callable(call) else None


def set_epoch(data: object, epoch: int) -> None:
    """Call the `set_epoch` of data or of a sampler, if it has one."""
    call = getattr(data, "set_epoch", None)
    if callable(call):
        call(epoch)
