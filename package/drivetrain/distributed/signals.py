"""Signals that ask a process to end soon: heard in a thread of their own, whatever the main thread does."""

from __future__ import annotations

import _thread
import os
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.distributed.last_words import end_now
from drivetrain.errors import EXIT_REQUEUE

_ECHO = 0.5
"""Seconds in which the same signal may come again, sent to the process and to its group, and count as one."""

_MOMENT = 0.1
"""Seconds for which the main thread waits until a signal is heard."""

_PYTHONS = (signal.SIG_DFL, signal.default_int_handler)
"""Handlers that nobody has set."""

_current: Signals | None = None
_told: set[int] = set()


class Signals:
    """Hears signals that ask for an end, and lets the process end by itself if that is soon enough.

    The first one is passed on to whoever has asked for it with `attach`. A second one ends the process at
    once: a signal of `stops` raises `KeyboardInterrupt` in the main thread, as Ctrl-C always does, another
    ends it without unwinding. So does the deadline.

    What the system calls at once only writes the signal's number to a socket (`signal.set_wakeup_fd`), which
    a thread reads: a main thread that waits in a collective, or in a long call of a library, hears nothing.
    That thread alone decides, and waits for no lock: what a signal interrupts in the main thread, such as a
    write to a full pipe, may hold any.

    A signal that has a handler of the program's own, or is ignored, is left alone. Only the main thread can
    have handlers: opened in another, or while another one is open, nothing happens. Copies of the process
    have the handlers that were there before.

    Args:
        requeues: Signals after which the process is to be started again.
        stops: Signals after which it is not.
        deadline: Gives the seconds that a signal leaves; None for no limit.
        say: Writes a line for the user.

    Attributes:
        first: The first signal that has come, or None.
    """

    def __init__(
        self,
        requeues: Sequence[signal.Signals],
        stops: Sequence[signal.Signals],
        deadline: Callable[[signal.Signals], float | None],
        say: Callable[[str], None],
    ) -> None:
        self._requeues, self._stops = tuple(requeues), tuple(stops)
        self._deadline = deadline
        self._say = say
        self.first: signal.Signals | None = None
        self._since = 0.0
        self._until: float | None = None
        self._ask: Callable[[signal.Signals], None] | None = None
        self._where: Callable[[], str] = str
        self._interrupted: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._wakes = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._main = 0
        self._raised: signal.Signals | None = None  # for the main thread, and to be heard no second time
        self._restoring = threading.Lock()
        self._hears = False  # the thread has taken something, and does what it asks for

    def open(self) -> None:
        """Begin."""
        global _current
        if threading.current_thread() is not threading.main_thread() or _current is not None:
            return
        free = [each for each in (*self._requeues, *self._stops) if _is_free(each)]
        if not free:
            return
        ends = socket.socketpair()
        for each in ends:
            each.setblocking(False)
        self._ends, self._main, _current = ends, threading.get_ident(), self
        before = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:  # an event loop's: the handlers write the numbers
            signal.set_wakeup_fd(before)
        for number in free:
            self._before[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._listen, name="drivetrain-signals", daemon=True)
        self._thread.start()

    def attach(self, ask: Callable[[signal.Signals], None], where: Callable[[], str]) -> None:
        """From now on there is something to finish.

        Args:
            ask: Is given the first signal, in a thread.
            where: Says what is there if it cannot be finished, in a thread.
        """
        self._where, self._ask = where, ask

    def close(self) -> None:
        """End; the process is as it was, but for handlers that were set meanwhile."""
        global _current
        if self._ends is None:
            return
        with self._restoring:
            self._restore()
            self._closing = True
        self._ends[1].send(b"\0")
        if self._thread is not None:
            self._thread.join()
        self._take()  # what has come at the very end
        for each in self._ends:
            each.close()
        self._ends = _current = None

    def _restore(self) -> None:
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)

    @property
    def handled(self) -> tuple[signal.Signals, ...]:
        """What is heard."""
        return tuple(self._before)

    def unheard(self) -> float:
        """For how many seconds the main thread has not heard that it is interrupted; 0 without that."""
        return 0.0 if self._interrupted is None else time.monotonic() - self._interrupted

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        """What Python calls, in the main thread and some time later."""
        if not self._wakes and self._ends is not None:
            self._ends[1].send(bytes([number]))
        self._wait_for_thread()
        if self._interrupted is not None:
            self._interrupted = None
            return signal.default_int_handler(number, frame)
        return None

    def _wait_for_thread(self) -> None:
        """Let the thread hear what has come, so that the update that is made is the last; not for long."""
        until = time.monotonic() + _MOMENT
        while self._ends is not None and time.monotonic() < until:
            try:
                self._ends[0].recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # it is taken
                if not self._hears:
                    return
            time.sleep(0.0005)

    def _listen(self) -> None:
        assert self._ends is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._ends[0], selectors.EVENT_READ)
            self._listen_by(selector)

    def _listen_by(self, selector: selectors.BaseSelector) -> None:
        while not self._closing:
            until = self._until
            selector.select(None if until is None else max(0.0, until - time.monotonic()))
            self._hears = True
            self._take()
            self._hears = False
            if until is not None and time.monotonic() >= until and not self._closing:
                assert self.first is not None
                name, passed = self.first.name, time.monotonic() - self._since
                self._end(f"{passed:.0f} s after {name}, the deadline: {self._where()}")

    def _take(self) -> None:
        try:
            numbers = self._ends[0].recv(1 << 12) if self._ends is not None else b""
        except BlockingIOError:
            return
        for each in numbers:
            if each == self._raised:
                self._raised = None
            elif each in self._before:
                self._hear(signal.Signals(each))

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.first is None and self._ask is not None:
            self.first, self._since = number, now
            limit = self._deadline(number)
            self._until = None if limit is None else now + limit
            self._ask(number)
        elif number == self.first and now - self._since < _ECHO:
            return
        elif number in self._stops:
            self._interrupted = now
            self._interrupt(number)
        elif self.first is None:
            self._end(f"{number.name} before the training has begun")
        else:
            self._end(f"{number.name}, the second signal: {self._where()}")

    def _interrupt(self, number: signal.Signals) -> None:
        """Have the main thread call the handler, which now raises, also out of a call that waits."""
        with self._restoring:  # after which the signal may have its default action
            if not self._closing:
                self._raised = number
                if hasattr(signal, "pthread_kill"):
                    signal.pthread_kill(self._main, number)
                else:
                    _thread.interrupt_main(number)

    def _end(self, why: str) -> None:
        try:
            self._say(f"{why}; exit code {EXIT_REQUEUE}")
        finally:
            end_now(EXIT_REQUEUE)

    def leave_to_parent(self) -> None:
        """In a copy of this process, which would tell the original of its own signals."""
        global _current
        self._restore()
        if self._ends is not None:
            for each in self._ends:
                each.close()
        self._ends = _current = None


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody has decided what a signal does; says once if somebody has."""
    found = signal.getsignal(number)
    if found is signal.SIG_IGN:
        return False
    if found in _PYTHONS and (found is signal.default_int_handler or not _is_caught(number)):
        return True
    if number not in _told:
        _told.add(number)
        warnings.warn(
            f"{number.name} has a handler of the program's own, which stays: this signal ends no run in"
            " order. Remove the handler, or leave the signal out of PreemptionConfig",
            stacklevel=2,
        )
    return False


def _is_caught(number: signal.Signals) -> bool:
    """Whether code that is not Python's has set a handler, such as `faulthandler.register`."""
    if sys.platform != "linux":
        return False
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def current() -> Signals | None:
    """Those that are heard now, if any are."""
    return _current


def handled() -> tuple[signal.Signals, ...]:
    """What is heard now, where it can be held back."""
    return () if _current is None or not hasattr(signal, "pthread_sigmask") else _current.handled


@contextmanager
def held_back() -> Iterator[None]:
    """Start processes that the signals of now are not to end, once they call `unmoved`, nor before. What
    comes meanwhile is heard afterwards, here.
    """
    numbers = handled()
    if not numbers:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unmoved(numbers: Sequence[int]) -> None:
    """In a process that was started under `held_back`: such signals do nothing here any more.

    A batch system may send them to every process of a job, and the one that has started this needs it until
    it has ended in order. They have a handler, and are not ignored, so that programs that are started from
    here have them as ever; a copy of the process, by `os.fork`, has that handler too. The process leaves its
    group, so that it is spared what is sent to that.

    Args:
        numbers: What `handled` gave when the process was started.
    """
    if not numbers:
        return
    os.setpgid(0, 0)
    for number in numbers:
        # Of torch's own for SIGTERM, by which all but the parent end a worker, Python knows nothing.
        if signal.getsignal(number) in _PYTHONS:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # a call of a library need not be begun again
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # one that has come before does nothing either


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Whoever has started this process decides."""


def _after_fork() -> None:
    if _current is not None:
        _current.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
