"""Ctrl-C for a process whose main thread is in a call that does not return, such as a collective."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

from drivetrain.distributed.signals import Signals, current

_current: Interrupts | None = None


class Interrupts:
    """Tells another thread of a SIGINT that has not reached the main thread.

    Python raises `KeyboardInterrupt` in the main thread between two bytecodes, so never while that thread
    waits in a collective. The signal handler in C writes the signal's number to a socket at once
    (`signal.set_wakeup_fd`), and any thread can read that socket.

    Where the first SIGINT ends a run in order (see `Signals`), only a second one counts. Elsewhere SIGINT
    counts only if Ctrl-C has its default action and nothing else reads the wakeup socket: a program with its
    own handler or event loop decides for itself. Open and close it in the main thread; in any other thread
    it does nothing.
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._signals: Signals | None = None
        self._since: float | None = None
        self._taking = threading.RLock()  # one signal's handler may interrupt another's

    def open(self) -> None:
        """Begin to listen."""
        global _current
        signals = current()
        if signals is not None and signal.SIGINT in signals.handled:
            self._signals = signals
            return
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        ends = socket.socketpair()
        for each in ends:
            each.setblocking(False)
        before = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            for each in ends:
                each.close()
            return
        self._ends, _current = ends, self
        signal.signal(signal.SIGINT, self._hear)

    def close(self) -> None:
        global _current
        self._signals = None
        if self._ends is None:
            return
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGINT) == self._hear:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in self._ends:
            each.close()
        self._ends = _current = None

    def unheard(self) -> float:
        """Return for how many seconds an interrupt has not reached the main thread; 0 without one."""
        signals = self._signals
        if signals is not None:
            return signals.unheard()
        with self._taking:
            if self._came():
                self._since = time.monotonic() if self._since is None else self._since
            return 0.0 if self._since is None else time.monotonic() - self._since

    def _came(self) -> bool:
        ends = self._ends
        try:
            return ends is not None and signal.SIGINT in ends[0].recv(1 << 12)
        except OSError:  # nothing has arrived, or the main thread has just closed the socket
            return False

    def _hear(self, number: int, frame: FrameType | None) -> Any:
        with self._taking:
            self._came()
            self._since = None
        return signal.default_int_handler(number, frame)


def _leave_to_parent() -> None:
    """Close the socket in a forked process, which would report its own signals to its parent."""
    if _current is not None:
        _current.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
