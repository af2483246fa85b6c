"""A silent process is waited for while it computes; one that is stopped, gone or idle has failed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from drivetrain.distributed.failure.silence import PATIENCE, Silence, activity, machine

pytestmark = pytest.mark.skipif(
    machine() is None, reason="needs Linux, where it can be seen what a process does"
)

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs, and ends them."""
    running = []

    def begin(program: str) -> subprocess.Popen[bytes]:
        running.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
        return running[-1]

    yield begin
    for each in running:
        each.kill()
        each.communicate()


def has_computed(process: subprocess.Popen[bytes]) -> None:
    """Wait for that."""
    while activity(process.pid).used < 0.1:
        time.sleep(0.01)


def ticks(silence: Silence, number: int, pause: float = 0.0) -> list[str | None]:
    """What so many ticks tell."""
    found = []
    for _ in range(number):
        time.sleep(pause)
        found.append(silence.tick())
    return found


def test_a_process_that_computes_is_waited_for_however_long_it_is_silent(start: Start) -> None:
    process = start("while True: pass")
    has_computed(process)
    assert ticks(Silence(machine(), process.pid, 0.1), 8 * PATIENCE, pause=0.02) == [None] * (8 * PATIENCE)


def test_threads_that_compute_count_while_the_main_one_sleeps(start: Start) -> None:
    process = start("import threading, time; threading.Thread(target=lambda: sum(iter(int, 1))).start()")
    has_computed(process)
    assert ticks(Silence(machine(), process.pid, 0.2), 6 * PATIENCE, pause=0.04) == [None] * (6 * PATIENCE)


def test_one_that_does_nothing_has_failed_after_twelve_timeouts(start: Start) -> None:
    process = start("import sys, time; sys.stdout.write('asleep'); sys.stdout.flush(); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.read(6) == b"asleep"
    while activity(process.pid).state != "S":
        time.sleep(0.01)
    found = ticks(Silence(machine(), process.pid, 1.0), 5 * PATIENCE)
    assert found[:-1] == [None] * (5 * PATIENCE - 1)
    assert found[-1] == "it has not answered for 12 s, and is idle"


def test_one_that_cannot_be_seen_has_failed_after_twelve_timeouts() -> None:
    found = ticks(Silence("another machine", 1, 1.0), 5 * PATIENCE)
    assert found == [None] * (5 * PATIENCE - 1) + ["it has not answered for 12 s"]


def test_one_that_is_stopped_or_gone_has_failed_after_one_timeout(start: Start) -> None:
    process = start("import time; time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    while activity(process.pid).state != "T":
        time.sleep(0.01)
    found = ticks(Silence(machine(), process.pid, 1.0), 5)
    assert found == [None] * 4 + ["it is stopped (by SIGSTOP, say) and has not answered for 1 s"]
    process.kill()
    process.wait()
    assert "it was killed" in str(ticks(Silence(machine(), process.pid, 1.0), 5)[-1])


def test_a_word_ends_a_silence(start: Start) -> None:
    silence = Silence("another machine", 1, 1.0)
    ticks(silence, 5 * PATIENCE - 1)
    silence.end()
    assert (silence.ticks, ticks(silence, 5 * PATIENCE - 1)) == (0, [None] * (5 * PATIENCE - 1))


def test_a_process_that_has_failed_is_ended(start: Start) -> None:
    process = start("import time; time.sleep(60)")
    Silence("another machine", process.pid, 1.0).end_process()
    assert process.poll() is None, "it is another process of that number"
    Silence(machine(), process.pid, 1.0).end_process()
    assert process.wait(10) == -signal.SIGKILL
