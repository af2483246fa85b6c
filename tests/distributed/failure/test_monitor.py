"""Rank 0's part of the failure channel, without its thread and by a clock that only the tests move."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.support.messages import warned

from drivetrain.distributed.failure.heartbeat import PATIENCE, machine
from drivetrain.distributed.failure.location import Phase
from drivetrain.distributed.failure.messages import TIMING, Cause, Line, connect
from drivetrain.distributed.failure.monitor import Monitor

TICK = 0.01
TIMES = replace(
    TIMING, heartbeat=5 * TICK, joining=3 * TICK, aside=4 * TICK, late=10 * TICK, opaque=10 * TICK
)
LIMIT = 5 * TICK
STATE = {"where": "", "progress": None, "signs": None, "phase": Phase.WORKS, "collective": "", "passed": -1}


def hello(rank: int) -> dict[str, Any]:
    return {"rank": rank, "machine": machine(), "pid": os.getpid()}


class Job:  # a monitor and what two ranks say to it, as their channels would
    def __init__(self, limit: float | None = None) -> None:
        self.now, self.taken = 0.0, 0
        self.lines: list[Line] = []
        self.monitor = Monitor(2, "127.0.0.1", TIMES, limit, clock=lambda: self.now)
        take = self.monitor._take

        def counted(peer: Any, message: dict[str, Any]) -> None:
            take(peer, message)
            self.taken += 1

        self.monitor._take = counted  # type: ignore[method-assign]

    def turn(self) -> None:
        self.monitor.turn()

    def until(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline
            self.turn()

    def join(self, *ranks: int) -> None:
        offer = {"port": self.monitor.port, "token": self.monitor.token, "hosts": [], "machine": machine()}
        for rank in ranks or range(2):
            self.lines.append(connect(rank, offer, None, 60.0))
            self.lines[rank].send(kind="hello", **{**STATE, **hello(rank)})
        self.until(lambda: len(self.monitor._peers) == len(self.lines))

    def say(self, rank: int, kind: str = "beat", **state: object) -> None:
        taken = self.taken
        assert self.lines[rank].send(kind=kind, **{**STATE, **state})
        self.until(lambda: self.taken > taken)

    def hears(self, rank: int, kind: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        line = self.lines[rank]
        self.until(lambda: found.extend(line.receive() or ()) or any(e["kind"] == kind for e in found))
        return next(each for each in found if each["kind"] == kind)

    def tick(self, count: int, *states: dict[str, Any]) -> None:  # before each, every rank says how it is
        for _ in range(count):
            for rank, state in enumerate(states):
                if self.monitor.cause is None:
                    self.say(rank, **state)
            self.now += 1.001 * TICK
            self.turn()

    def closes(self, connection: socket.socket) -> bool:  # within the time that strangers have
        connection.setblocking(False)
        for _ in range(10):
            with contextlib.suppress(BlockingIOError):
                try:
                    return connection.recv(1) == b""
                except ConnectionError:  # with something of it unread
                    return True
            self.tick(1)
        return False

    def names_the_right_cause(self) -> None:
        assert self.monitor.cause is None
        self.say(1, "cause", cause=Cause("error", 1, "step 7", "ValueError: boom").to_json())
        told = Cause.from_json(self.hears(0, "cause")["cause"])
        assert str(told) == "rank 1 failed first, at step 7: ValueError: boom"

    def close(self) -> None:
        for each in self.lines:
            each.close()
        self.monitor.close()


@pytest.fixture
def alone() -> Iterator[Job]:  # a monitor that no rank has joined yet
    job = Job()
    yield job
    job.close()


@pytest.fixture
def job(alone: Job) -> Job:
    alone.join()
    return alone


def test_a_rank_that_joins_after_the_failure_of_another_is_told_of_it(alone: Job) -> None:
    alone.join(0)
    alone.say(0, "cause", cause=Cause("error", 0, "step 0", "ConfigError: no").to_json())
    assert not alone.monitor.is_over()
    alone.join(1)
    assert Cause.from_json(alone.hears(1, "cause")["cause"]).what == "ConfigError: no"
    alone.say(1, "bye")
    assert alone.monitor.is_over()


@contextlib.contextmanager
def joined(limit: float | None = None) -> Iterator[Job]:
    job = Job(limit)
    try:
        job.join()
        yield job
    finally:
        job.close()


@contextlib.contextmanager
def stranger(job: Job, content: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", job.monitor.port), 60) as found:
        found.setblocking(False)
        with contextlib.suppress(ConnectionError):  # the monitor may close it in the middle
            while content:
                with contextlib.suppress(BlockingIOError):
                    content = content[found.send(content) :]
                job.turn()
        yield found


DEEP = b"[" * 200_000 + b"\n"
HELLO = b'{"kind": "hello", "rank": 1, "machine": null, "pid": 1, "where": ""}\n'
GUESSED = b"0" * 32 + b"\n"


def test_strangers_are_dropped_and_change_nothing(alone: Job) -> None:
    with stranger(alone, GUESSED + HELLO) as connection:
        assert alone.closes(connection), "before the ranks have joined"
    alone.join()
    for content in (b"GET / HTTP/1.1\r\nHost: a-machine-of-the-net\r\n\r\n", DEEP, b"\xff" * 33, b"\n", b""):
        with stranger(alone, content) as connection:
            assert alone.closes(connection), content[:40]
    alone.names_the_right_cause()


def test_many_silent_strangers_keep_no_rank_out(alone: Job) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(stranger(alone))
            alone.turn()
        assert len(alone.monitor._unknown) < 100, "the oldest have been dropped, before their time"
        alone.join()
        alone.names_the_right_cause()


def test_a_connection_that_knows_the_token_can_end_only_itself(job: Job) -> None:
    token = f"{job.monitor.token}\n".encode()
    wrong = [b"7\n", b"{}\n", b'{"rank": 1}\n', b"\xff\n", b"x" * (2 << 20), b'{"rank": 9}\n', b"", HELLO]
    for content in (DEEP, *wrong):
        with stranger(job, token + content) as connection:
            assert job.closes(connection), content[:40]
    job.names_the_right_cause()


def test_a_rank_that_sends_no_message_is_lost_and_not_called_killed(job: Job) -> None:
    job.lines[1].socket.sendall(DEEP)
    job.until(lambda: job.monitor.cause)
    assert job.monitor.cause is not None
    assert (job.monitor.cause.kind, job.monitor.cause.rank) == ("lost", 1)
    assert "its line to rank 0 broke (RecursionError" in str(job.monitor.cause)
    assert "killed" not in str(job.monitor.cause)


LOST = Cause("consequence", 0, "step 7", "RuntimeError: gloo: connection reset").to_json()


def test_a_consequence_waits_for_its_cause(job: Job) -> None:
    job.say(0, "cause", cause=LOST)
    job.tick(3)
    job.names_the_right_cause()


def test_a_consequence_without_a_cause_is_reported_after_a_while() -> None:
    for left in (False, True):
        with joined() as job:
            if left:
                job.say(1, "bye", where="step 6")
            job.say(0, "cause", cause=LOST)
            job.tick(3)
            assert job.monitor.cause is None
            job.tick(2)
            told = str(job.monitor.cause)
            if left:
                location = "last heard of at step 6: it had ended when rank 0, at step 7, waited for it"
                assert told.startswith(f"rank 1 failed first, {location}")
            else:
                assert told.startswith("rank 0 failed first, at step 7: RuntimeError: gloo")


def test_a_rank_that_does_not_join_is_named(alone: Job) -> None:
    alone.tick(5 * PATIENCE)
    assert (
        str(alone.monitor.cause) == "rank 0 failed first: it has not joined the failure channel within 0.6 s"
    )


def test_where_rank_0_is_reaches_the_others_at_once(job: Job) -> None:
    assert job.hears(1, "beat")["where"] == ""
    job.say(0, where="in training, after step 0")
    assert job.hears(1, "beat")["where"] == "in training, after step 0"


WAITS = {"phase": Phase.WAITS, "collective": "barrier (train.py:9)"}
HOOK = {"progress": 7, "where": "in training, after step 3, in on_step_end of Acts"}
BACKWARD = {"progress": 7, "where": "in training, after step 3, in the backward", **WAITS}


def test_a_hang_names_the_rank_that_is_behind() -> None:
    hook, backward, waits = HOOK["where"], BACKWARD["where"], "in barrier (train.py:9)"
    for first, second, told, behind in (
        ({**HOOK, "progress": 8}, BACKWARD, f"rank 1 is behind, {waits}, {backward}; rank 0 is {hook}", 1),
        (HOOK, {**HOOK, **WAITS}, f"rank 0 is behind, {hook}; rank 1 waits {waits}, {hook}", 0),
        (BACKWARD, BACKWARD, f"ranks 0 and 1 wait {waits}, {backward}", 0),
    ):
        with joined(LIMIT) as job:
            job.tick(4, first, second)
            assert job.monitor.cause is None
            job.tick(2, first, second)
            assert job.monitor.cause is not None
            assert str(job.monitor.cause) == f"no progress for 0.05 s; {told}"
            assert (job.monitor.cause.kind, job.monitor.cause.rank) == ("hang", behind)


@pytest.mark.parametrize("limit", [None, 100 * TICK])
def test_until_the_first_step_the_rank_that_the_others_wait_for_is_named_and_nothing_ends(
    limit: float | None,
) -> None:
    waits = {**WAITS, "where": "in the set-up of the run"}
    late = r"no progress for 0.12 s; rank 1 is behind, in the set-up; rank 0 waits in barrier"
    with joined(limit) as job, warned(late) as told:
        job.tick(30, waits, {"where": "in the set-up"})
        assert job.monitor.cause is None
        assert job.hears(1, "stacks")  # it shows them itself
    assert len(told) == 1
    for first, second in ((waits, waits), ({**waits, "progress": 1}, {"progress": 1})):
        with joined(None) as job:
            job.tick(20, first, second)


def test_once_the_set_up_of_rank_0_is_done_a_rank_that_hangs_in_its_own_is_named(job: Job) -> None:
    waits = {"where": "in the set-up of the run"}
    job.tick(3, HOOK, waits)
    job.monitor.limit(LIMIT)
    job.tick(6, HOOK, waits)
    assert "rank 1 is behind, in the set-up of the run; rank 0 is in training" in str(job.monitor.cause)


def test_progress_of_any_rank_counts_against_a_hang() -> None:
    for name in ("progress", "signs"):
        with joined(LIMIT) as job:
            for number in range(6):
                job.tick(4, {}, {name: number})
            assert job.monitor.cause is None, str(job.monitor.cause)


def test_a_phase_without_signs_has_more_time() -> None:
    saves = {"phase": Phase.OPAQUE, "where": "in a save", "progress": 7}
    waits = {**WAITS, "progress": 7}
    with joined(LIMIT) as job:
        job.tick(14, saves, waits)
        assert job.monitor.cause is None
        job.tick(2, saves, waits)
        assert "rank 0 is behind, in a save; rank 1 waits" in str(job.monitor.cause)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of open files")
def test_rank_0_opens_all_the_files_it_may_and_names_the_limit() -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        job = Job()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limits[1]
        with socket.create_connection(("127.0.0.1", job.monitor.port)):
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            job.until(lambda: job.monitor.cause)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert f"rank 0 failed first: Too many open files: rank 0 has {free} files" in str(job.monitor.cause)
    job.monitor.close()
