"""Whether a dataset has been changed since workers were started, each with a copy of it."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

_AT_MOST = 2000
"""So many things are looked at, the nearest first, so that a look takes no more than a few milliseconds."""

_SHORT = 64
"""Containers that are longer hold data, and are not looked into."""

_SMALL = 4096
"""Bytes of an array whose values are looked at."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Copied:
    """What workers have copies of, as it was when they were started.

    Looked at are the attributes of objects and of what these hold: numbers and texts by value, tensors by
    torch's count of their changes, other things by which object it is. What is changed inside of large
    arrays, or of objects that hide what they hold, is not seen.

    Args:
        objects: The dataset, and whatever else is copied.
    """

    def __init__(self, *objects: Any) -> None:
        self._objects = objects
        self._before: dict[str, Any] = {}

    def note(self) -> None:
        """Remember how it is now."""
        self._before = _look(self._objects)

    def changed(self) -> str | None:
        """The name of what has been changed since, such as "transform.scale"; None if nothing has."""
        now, before = _look(self._objects), self._before
        for name in (*now, *before):
            if name not in now or name not in before or now[name] != before[name]:
                return name
        return None


def _look(objects: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: set[int] = set()
    ahead = deque(("", each) for each in objects)
    while ahead and len(found) < _AT_MOST:
        name, each = ahead.popleft()
        if isinstance(each, _PLAIN):
            found[name] = type(each), repr(each) if each != each else each
            continue
        found[name] = _mark(each)
        if id(each) not in seen:
            seen.add(id(each))
            ahead.extend(_inside(name, each))
    return found


def _inside(name: str, each: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(each, (list, tuple, dict)) and len(each) <= _SHORT:
        items = each.items() if isinstance(each, dict) else enumerate(each)
        return [(f"{name}[{key!r}]", value) for key, value in items]
    kind = type(each)
    # Python's own objects, such as loggers and locks, change by themselves.
    python = kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not SimpleNamespace
    own = None if python or isinstance(each, (Tensor, type)) else getattr(each, "__dict__", None)
    if not isinstance(own, dict):
        return ()
    return [(f"{name}.{key}" if name else str(key), value) for key, value in own.items()]


def _mark(each: Any) -> Any:
    """What is another for another object, and, as far as it can be told, for one that has been changed."""
    if isinstance(each, np.generic):
        return type(each), each.tobytes()
    if isinstance(each, (list, tuple, dict)):
        return type(each), len(each), None if len(each) <= _SHORT else id(each)
    if isinstance(each, (set, frozenset)):
        return type(each), len(each)
    try:
        which: Any = weakref.ref(each)
    except TypeError:
        which = id(each)
    if isinstance(each, Tensor):
        return id(each), which, None if each.is_inference() else each._version
    if isinstance(each, np.ndarray):
        return id(each), which, each.tobytes() if each.nbytes <= _SMALL and not each.dtype.hasobject else None
    return id(each), which  # in this order: two references that are alive would compare what they refer to
