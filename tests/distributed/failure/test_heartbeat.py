"""A process that sends nothing is waited for while it computes; one that is stopped or idle has failed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.distributed.failure import heartbeat as module
from drivetrain.distributed.failure.heartbeat import PATIENCE, Activity, Heartbeat, activity, machine

pytestmark = pytest.mark.skipif(machine() is None, reason="needs Linux, where processes can be seen")
LIMIT = 5 * PATIENCE


def ticks(heartbeat: Heartbeat, number: int) -> list[str | None]:
    return [heartbeat.tick() for _ in range(number)]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Heartbeat]:  # of a process of this machine
    def make(seen: Callable[[int], Activity], timeout: float = 1.0) -> Heartbeat:
        heartbeat = Heartbeat(machine(), 1, timeout)
        monkeypatch.setattr(module, "activity", lambda pid: seen(heartbeat.ticks))
        return heartbeat

    return make


def test_a_process_that_computes_is_waited_for_however_long_it_has_no_heartbeat(near: Any) -> None:
    for seen in (
        lambda tick: Activity("R", 0.0),
        lambda tick: Activity("S", 0.01 * tick),  # a thread computes while the main one sleeps
        lambda tick: Activity("R" if tick % 2 else "S", 0.0),
    ):
        assert not any(ticks(near(seen), LIMIT))


def test_one_that_does_nothing_or_cannot_be_seen_has_failed_after_twelve_timeouts(near: Any) -> None:
    for heartbeat, told in (
        (near(lambda tick: Activity("S", 0.002 * tick)), "it has not answered for 12 s, and is idle"),
        (near(lambda tick: Activity("", 0.0)), "it has not answered for 12 s, and is idle"),
        (Heartbeat("another machine", 1, 1.0), "it has not answered for 12 s"),
    ):
        assert ticks(heartbeat, LIMIT) == [None] * (LIMIT - 1) + [told]


def test_one_that_is_stopped_or_gone_has_failed_after_one_timeout(near: Any) -> None:
    found = ticks(near(lambda tick: Activity("T", 0.0)), 5)
    assert found == [None] * 4 + ["it is stopped (by SIGSTOP, say) and has not answered for 1 s"]
    found = ticks(near(lambda tick: Activity("gone", 0.0)), 5)
    assert found[:4] == [None] * 4
    assert "it was killed" in str(found[4])


def test_a_message_is_a_beat() -> None:
    heartbeat = Heartbeat("another machine", 1, 1.0)
    ticks(heartbeat, LIMIT - 1)
    heartbeat.beat()
    assert (heartbeat.ticks, ticks(heartbeat, LIMIT - 1)) == (0, [None] * (LIMIT - 1))


@pytest.mark.real("stops and kills a process")
def test_activity_tells_what_a_process_does() -> None:
    def until(state: str, used: float = 0.0) -> None:
        deadline = time.monotonic() + 60
        while activity(process.pid).state != state or activity(process.pid).used < used:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    # A process without Python starts in a hundredth of a second.
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        until("R", used=0.1)
        process.send_signal(signal.SIGSTOP)
        until("T")
        Heartbeat("another machine", process.pid, 1.0).end_process()
        assert process.poll() is None, "it is another process of that number"
        Heartbeat(machine(), process.pid, 1.0).end_process()
        assert process.wait(60) == -signal.SIGKILL
        assert activity(process.pid).state == "gone"
    with subprocess.Popen(["sleep", "600"]) as process:
        until("S")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert activity(process.pid).state == "gone", "though nobody has read how it ended"
