"""Signals that ask a process to end soon, handled in a thread of their own whatever the main thread does."""

from __future__ import annotations

import _thread
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from drivetrain.core.errors import EXIT_REQUEUE
from drivetrain.core.messages import logger
from drivetrain.distributed.failure.last_words import end_now

_LOG = logger(__name__)

AGENT = "TORCHELASTIC_RUN_ID"
"""An environment variable of the processes of torch's agent, which signals all once one has failed."""

_ECHO = 0.5
"""Signals repeated within this many seconds count once: one may go to the process and to its group."""

_MOMENT = 0.1
"""The longest wait of the main thread, in seconds, for the thread that handles a signal."""

_PYTHONS = (signal.SIG_DFL, signal.default_int_handler)
"""Python's default handlers: the program has set none."""

_current: Signals | None = None
_warned: set[int] = set()


class Signals:
    """Handles signals that ask for an end, and gives the process time to end by itself.

    The first signal is passed to the callback given to `attach`. A second one ends the process at once: a
    signal of `stops` raises `KeyboardInterrupt` in the main thread, as Ctrl-C always does; any other ends
    the process without unwinding, and so does the deadline.

    The handler in C writes the signal's number to a socket (`signal.set_wakeup_fd`), which a thread reads: no
    Python handler runs while the main thread is in a collective or a long library call. That thread alone
    decides, and it waits for no lock: the code that a signal interrupts in the main thread, such as a write
    to a full pipe, may hold any.

    A signal that is ignored or has a handler of the program is left alone. Only the main thread can set
    handlers: opened in another thread, or while another instance is open, this does nothing, but one that has
    only `stops` makes way. Forked copies of the process get the earlier handlers back.

    Args:
        requeues: Signals after which the process is started again.
        stops: Signals after which it is not.
        deadline: Returns the seconds that a signal leaves; None for no limit.
        say: Writes a line for the user.

    Attributes:
        first: The first signal that has arrived, or None.
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
        self._code = EXIT_REQUEUE
        self._interrupted: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._wakes = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._main = 0
        self._raised: signal.Signals | None = None  # raised in the main thread; not to be handled again
        self._restoring = threading.Lock()
        self._hears = False  # the thread is handling a signal that it has read
        self._has_failed = False

    def open(self) -> None:
        """Set the handlers and start the thread."""
        global _current
        if threading.current_thread() is not threading.main_thread():
            return
        if _current is not None:
            if _current._requeues:
                return
            _current.close()  # a failure channel's, which listens for interrupts alone
        free = [each for each in (*self._requeues, *self._stops) if _is_free(each)]
        if not free:
            return
        ends = socket.socketpair()
        for each in ends:
            each.setblocking(False)
        self._ends, self._main, _current = ends, threading.get_ident(), self
        before = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        self._wakes = before == -1
        if not self._wakes:  # an event loop has the wakeup socket: our handlers write the numbers
            signal.set_wakeup_fd(before)
        for number in free:
            self._before[number] = signal.signal(number, self._handle)
        self._thread = threading.Thread(target=self._listen, name="drivetrain-signals", daemon=True)
        self._thread.start()

    def attach(
        self, ask: Callable[[signal.Signals], None], where: Callable[[], str], code: int = EXIT_REQUEUE
    ) -> None:
        """Pass the first signal to `ask` from now on, so that the run can finish in order.

        Args:
            ask: Called in a thread with the first signal.
            where: Called in a thread; says what is saved if the run cannot finish.
            code: The exit code after a second signal, or a deadline.
        """
        self._where, self._ask, self._code = where, ask, code

    def close(self) -> None:
        """Stop the thread and restore the handlers, except those that were set meanwhile."""
        global _current
        if self._ends is None:
            return
        with self._restoring:
            self._restore()
            self._closing = True
        self._ends[1].send(b"\0")
        if self._thread is not None:
            self._thread.join()
        self._take()  # signals of the last moment
        for each in self._ends:
            each.close()
        self._ends = _current = None

    def _restore(self) -> None:
        if self._wakes:
            signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                is_agents = self._has_failed and number in self._requeues and AGENT in os.environ
                signal.signal(number, signal.SIG_IGN if is_agents else before)

    def disregard_requeues(self) -> None:
        """Let signals of `requeues` do nothing from now on: the job has failed, and its launcher sends them.

        Under torch's agent they do nothing after `close` either, so that this process can still print the
        cause. The agent kills it if it takes long.
        """
        self._has_failed = True

    @property
    def handled(self) -> tuple[signal.Signals, ...]:
        return tuple(self._before)

    def unheard(self) -> float:
        """Return for how many seconds an interrupt has not reached the main thread; 0 without one."""
        return 0.0 if self._interrupted is None else time.monotonic() - self._interrupted

    def _handle(self, number: int, frame: FrameType | None) -> Any:
        """Handle a signal in the main thread; Python may call this late."""
        if not self._wakes and self._ends is not None:
            self._ends[1].send(bytes([number]))
        self._wait_for_thread()
        if self._interrupted is not None:
            self._interrupted = None
            return signal.default_int_handler(number, frame)
        return None

    def _wait_for_thread(self) -> None:
        """Give the thread a moment to handle the signal, so that the current step is the last."""
        until = time.monotonic() + _MOMENT
        while self._ends is not None and time.monotonic() < until:
            try:
                self._ends[0].recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # the thread has read it
                if not self._hears:
                    return
            time.sleep(0.0005)

    def _listen(self) -> None:
        assert self._ends is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._ends[0], selectors.EVENT_READ)
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
        if self._has_failed and number in self._requeues:
            return
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
        """Have the main thread call the handler, which now raises, even out of a blocking call."""
        with self._restoring:  # once restored, the signal may have its default action
            if not self._closing:
                self._raised = number
                if hasattr(signal, "pthread_kill"):
                    signal.pthread_kill(self._main, number)
                else:
                    _thread.interrupt_main(number)

    def _end(self, why: str) -> None:
        try:
            self._say(f"{why}; exit code {self._code}")
        finally:
            end_now(self._code)

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked process, which would report its own signals to its parent."""
        global _current
        self._restore()
        if self._ends is not None:
            for each in self._ends:
                each.close()
        self._ends = _current = None


def _is_free(number: signal.Signals) -> bool:
    """Return whether the program has set no handler for a signal; warns once if it has."""
    found = signal.getsignal(number)
    if found is signal.SIG_IGN:
        return False
    if found is signal.default_int_handler:
        return True
    # Code outside Python, such as `faulthandler.register`, may have set a handler.
    if found is signal.SIG_DFL and not _is_handled_outside(number):
        return True
    if number not in _warned:
        _warned.add(number)
        _LOG.warning(
            f"the program has its own handler for {number.name}, which stays: this signal will not end a run"
            " in order. Remove the handler, or leave the signal out of PreemptionConfig"
        )
    return False


def _is_handled_outside(number: signal.Signals) -> bool:
    """Return whether code outside Python handles a signal of this process; only Linux tells."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as file:
        caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def current() -> Signals | None:
    """Return the instance that is open, or None."""
    return _current


def handled() -> tuple[signal.Signals, ...]:
    """Return the signals that are handled now and can be blocked."""
    return () if _current is None or not hasattr(signal, "pthread_sigmask") else _current.handled


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Run the block, which starts processes, with the handled signals blocked.

    A process started here must call `ignore_signals`, after which these signals do nothing in it. Signals
    that arrive meanwhile are handled here afterwards.
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


def ignore_signals(numbers: Sequence[int]) -> None:
    """Make signals do nothing in a process that was started under `signals_blocked`.

    A batch system may send them to every process of a job, and the parent needs this process until it has
    ended in order. The signals get a handler and are not ignored, so that programs started from here have
    them as usual; a copy of the process by `os.fork` has that handler too. The process leaves its process
    group, so that signals to the group do not reach it.

    Args:
        numbers: What `handled` returned when the process was started.
    """
    if not numbers:
        return
    os.setpgid(0, 0)
    for number in numbers:
        # Python does not know torch's own SIGTERM handler, which lets any process except the parent end a
        # worker.
        if signal.getsignal(number) in _PYTHONS:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # library calls are resumed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # a pending one does nothing either


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Leave the decision to the process that started this one."""


def _after_fork() -> None:
    if _current is not None:
        _current.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
