"""Ctrl-C that the main thread cannot hear of is known to others; nobody else's signals are touched."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from drivetrain.distributed.interrupts import Interrupts

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="needs signals that a process can send itself"
)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    found = Interrupts()
    found.open()
    yield found
    found.close()
    assert signal.set_wakeup_fd(-1) == -1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_one_that_the_main_thread_hears_of_is_its_own(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert interrupts.unheard() == 0


def test_one_that_it_does_not_hear_of_is_known_to_others(interrupts: Interrupts) -> None:
    seen: list[float] = []
    begun, done = threading.Event(), threading.Event()

    def look() -> None:
        begun.wait()
        time.sleep(0.1)
        interrupt()
        while not done.wait(0.001):
            seen.append(interrupts.unheard())

    def call() -> None:
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # about a second

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    done.set()
    looking.join()
    assert max(seen) > 0
    assert interrupts.unheard() == 0, "it was heard in the end"


def test_other_signals_are_none(interrupts: Interrupts) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert interrupts.unheard() == 0


def test_a_program_with_a_handler_of_its_own_keeps_it() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    interrupts = Interrupts()
    interrupts.open()
    interrupt()
    assert interrupts.unheard() == 0
    interrupts.close()
    signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    interrupts = Interrupts()
    interrupts.open()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.close()
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
    assert before is not signal.default_int_handler


def test_an_event_loops_socket_stays_its_own() -> None:
    ends = socket.socketpair()
    for each in ends:
        each.setblocking(False)
    signal.set_wakeup_fd(ends[1].fileno())
    interrupts = Interrupts()
    interrupts.open()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    interrupts.close()
    assert signal.set_wakeup_fd(-1) == ends[1].fileno()
    assert ends[0].recv(10) == bytes([signal.SIGINT])
    for each in ends:
        each.close()


def test_a_copy_of_the_process_has_the_usual_signals(interrupts: Interrupts) -> None:
    pid = os.fork()
    if pid == 0:
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        os._exit(0 if usual and signal.set_wakeup_fd(-1) == -1 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_another_thread_than_the_main_one_has_none() -> None:
    interrupts = Interrupts()
    threads = [threading.Thread(target=each) for each in (interrupts.open, interrupts.close)]
    for each in threads:
        each.start()
        each.join()
    assert interrupts.unheard() == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
