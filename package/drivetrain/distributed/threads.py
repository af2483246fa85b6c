"""Threads that repeat a call, or that limit how long a call is waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Periodic:
    """Calls a function again and again in a daemon thread, with a pause before each call, until `stop`."""

    def __init__(self, act: Callable[[], object], pause: float, name: str) -> None:
        self._act, self._pause = act, pause
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._pause):
            self._act()

    def stop(self) -> None:
        """End the thread, after its present call."""
        self._stopped.set()
        self._thread.join()


def within(seconds: float, act: Callable[[], object], name: str) -> None:
    """Call a function that may block for ever, in a thread, for so many seconds at most; drop its error."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            act()

    thread = threading.Thread(target=attempt, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is already ending
        attempt()
    else:
        thread.join(seconds)
