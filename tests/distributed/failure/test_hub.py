"""Rank 0's part of the failure channel names the right cause, whatever is sent to its port."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from drivetrain.distributed.failure.hub import Hub
from drivetrain.distributed.failure.messages import TIMING, Cause, Line, connect, shortened
from drivetrain.distributed.failure.place import Phase
from drivetrain.distributed.failure.silence import machine

QUICK = replace(TIMING, silence=0.5, stranger=0.3, aside=0.2, opaque=1.0)
"""Ticks of a tenth of a second."""

LIMIT = 0.5


class Rank:
    """What a rank says to the hub: the words of its channel, without the process."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.offer = {"port": hub.port, "token": hub.token, "hosts": [], "machine": machine()}
        self.line: Line = connect(rank, self.offer, None, 5.0)
        assert self.say("hello", rank=rank, machine=machine(), pid=os.getpid(), stacks=(0, -1))

    def say(self, kind: str, **more: object) -> bool:
        """Send a message."""
        state = {
            "where": "",
            "progress": None,
            "signs": None,
            "phase": Phase.WORKS,
            "place": "",
            "passed": -1,
        }
        return self.line.send(kind=kind, **{**state, **more})

    def hears(self, kind: str, seconds: float = 20.0) -> dict[str, Any] | None:
        """The next message of a kind; None when the line is closed or nothing comes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.line.receive()
            if found is None:
                return None
            for each in found:
                if each["kind"] == kind:
                    return each
            time.sleep(0.005)
        return None


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    """A hub of two ranks, without a limit for hangs or with the given one."""
    found = Hub(2, True, QUICK, getattr(request, "param", None))
    yield found
    found.leave()


@pytest.fixture
def ranks(hub: Hub) -> Iterator[list[Rank]]:
    """Its two ranks, which the hub has heard."""
    found = [Rank(hub, rank) for rank in range(2)]
    for each in found:
        assert each.hears("beat") is not None
    yield found
    for each in found:
        each.line.close()


def happens(expected: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether something comes true before long."""
    deadline = time.monotonic() + seconds
    while not expected() and time.monotonic() < deadline:
        time.sleep(0.005)
    return expected()


def names_the_right_cause(hub: Hub, ranks: list[Rank]) -> None:
    """The hub lives, and hears both ranks."""
    assert hub._thread.is_alive()
    assert hub.cause is None
    assert ranks[0].hears("beat") is not None
    assert ranks[1].say("cause", cause=Cause("error", 1, "update 7", "ValueError: boom").to_json())
    told = ranks[0].hears("cause")
    assert told is not None
    assert str(Cause.from_json(told["cause"])) == "rank 1 failed first, at update 7: ValueError: boom"


@contextlib.contextmanager
def stranger(hub: Hub, content: bytes = b"") -> Iterator[socket.socket]:
    """A connection of somebody else's, and what it sends."""
    with socket.create_connection(("127.0.0.1", hub.port), 5) as found:
        with contextlib.suppress(OSError):  # the hub may have closed it in the middle
            found.sendall(content)
        yield found


def is_closed(connection: socket.socket) -> bool:
    """Whether the hub closes a connection, before five seconds have passed."""
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # with something of it unread
        return True


DEEP = b"[" * 200_000 + b"\n"
HELLO = b'{"kind": "hello", "rank": 1, "machine": null, "pid": 1, "stacks": [0, -1], "where": ""}\n'


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: a-machine-of-the-net\r\n\r\n", id="another protocol"),
        pytest.param(DEEP, id="deep JSON"),
        pytest.param(b"\xff" * 33, id="no text"),
        pytest.param(b"0" * 32 + b"\n" + b'{"kind": "hello"}\n', id="a token that was guessed"),
        pytest.param(b"\n", id="too short a token, and silence"),
        pytest.param(b"", id="silence"),
    ],
)
def test_a_stranger_is_dropped_and_changes_nothing(hub: Hub, ranks: list[Rank], content: bytes) -> None:
    with stranger(hub, content) as connection:
        assert is_closed(connection)
    names_the_right_cause(hub, ranks)


@pytest.mark.parametrize(
    "content",
    [DEEP, b"7\n", b"{}\n", b'{"rank": 1}\n', b"\xff\n", b"x" * (2 << 20), b'{"rank": 9}\n', b"", HELLO],
)
def test_a_connection_that_knows_the_token_can_end_only_itself(
    hub: Hub, ranks: list[Rank], content: bytes
) -> None:
    with stranger(hub, f"{hub.token}\n".encode() + content) as connection:
        assert is_closed(connection)
    names_the_right_cause(hub, ranks)


def test_a_whole_greeting_with_a_guessed_token_takes_no_ranks_place(hub: Hub) -> None:
    with stranger(hub, b"0" * 32 + b"\n" + HELLO) as connection:
        assert is_closed(connection)
    ranks = [Rank(hub, rank) for rank in range(2)]
    names_the_right_cause(hub, ranks)
    for each in ranks:
        each.line.close()


def test_a_rank_that_sends_no_message_is_lost_and_not_called_killed(hub: Hub, ranks: list[Rank]) -> None:
    ranks[1].line.socket.sendall(DEEP)
    assert happens(lambda: hub.cause is not None)
    assert (hub.cause.kind, hub.cause.rank) == ("lost", 1)  # type: ignore[union-attr]
    assert "its line to rank 0 broke (RecursionError" in str(hub.cause)
    assert "killed" not in str(hub.cause)


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EMFILE, errno.ENETDOWN, errno.EPROTO])
def test_a_connection_that_cannot_be_accepted_is_passed_over(
    hub: Hub, ranks: list[Rank], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, failed = hub._server, []

    class Failing:
        def accept(self) -> Any:
            if len(failed) < 3:
                failed.append(number)
                raise OSError(number, os.strerror(number))
            return server.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(server, name)

    monkeypatch.setattr(hub, "_server", Failing())
    with stranger(hub, b"x" * 33) as connection:
        assert is_closed(connection)
    assert failed == [number] * 3
    names_the_right_cause(hub, ranks)


def test_many_silent_strangers_keep_no_rank_out(hub: Hub) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(stranger(hub))
        ranks = [Rank(hub, rank) for rank in range(2)]
        names_the_right_cause(hub, ranks)
        for each in ranks:
            each.line.close()


def test_of_too_many_silent_strangers_the_oldest_is_dropped_before_its_time() -> None:
    hub = Hub(2, True, replace(QUICK, stranger=60.0), None)
    try:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(stranger(hub)) for _ in range(200)]
            assert is_closed(connections[0])
            assert happens(lambda: len(hub._unknown) < 100)
    finally:
        hub.leave()


def test_without_file_descriptors_living_ranks_are_not_taken_for_gone(hub: Hub, ranks: list[Rank]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        # Silent for longer than a stopped rank may be, and looked at. Rank 1 says nothing at all.
        for _ in range(8):
            assert ranks[0].hears("beat") is not None
        assert hub.cause is None, str(hub.cause)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    names_the_right_cause(hub, ranks)


def test_a_long_error_is_shortened_where_it_is_raised(hub: Hub, ranks: list[Rank]) -> None:
    error = ValueError("bad keys: " + "x\u2028" * 1_000_000 + " the last")
    cause = Cause.of_error(1, "update 7", error, "The last checkpoint is a/b")
    assert len(cause.what) < 20_000
    assert ranks[1].say("cause", cause=cause.to_json())
    assert happens(lambda: hub.cause is not None)
    assert str(hub.cause).startswith("rank 1 failed first, at update 7: ValueError: bad keys: x")
    assert str(hub.cause).endswith(" the last. The last checkpoint is a/b")
    assert "characters left out" in str(hub.cause)


def test_no_text_of_a_message_is_too_long_to_be_sent(hub: Hub, ranks: list[Rank]) -> None:
    long = "\U0001f600" * 1_000_000
    ranks[1].say("stop", asked=long)
    ranks[1].say("beat", where=long, place=long)
    assert ranks[0].hears("hold") is not None
    names_the_right_cause(hub, ranks)
    assert shortened("short") == "short"


def test_a_line_on_which_a_message_was_sent_in_part_sends_nothing_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        there, _ = server.accept()
    with there:
        line = Line(here, timeout=0.1)
        assert line.send(text="first")
        assert not line.send(numbers=[0] * 3_000_000), "nobody reads it"
        assert not line.send(text="second")
        assert isinstance(line.broken, TimeoutError)
        received = b""
        while content := there.recv(1 << 20):  # until the end
            received += content
        line.close()
    first, rest = received.split(b"\n")
    assert first == b'{"text": "first"}'
    assert b"second" not in rest


def test_a_line_without_an_end_is_refused_and_not_kept() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = Line(socket.create_connection(server.getsockname()), timeout=5.0)
        there, _ = server.accept()

    def talk() -> None:
        for _ in range(256):
            there.sendall(b"x" * (1 << 15))
            line.receive()

    with there:
        there.settimeout(5.0)
        with pytest.raises(ValueError, match="a line without an end"):
            talk()
    line.close()


def fuzz(hub: Hub, ranks: list[Rank], seconds: float, seed: int) -> int:
    """Send random bytes for a while, from several connections at once; returns how many there were."""
    draw = random.Random(seed)
    token, deadline, count = f"{hub.token}\n".encode(), time.monotonic() + seconds, 0
    open_ones: list[socket.socket] = []
    while time.monotonic() < deadline:
        count += 1
        content = draw.randbytes(int(10 ** draw.uniform(0, 5.5)))
        kind = draw.randrange(8)
        if kind == 0:
            content = token + content
        elif kind == 1:
            content = token + b'{"kind": "hello", "rank": 1, "x": "' + content + b'"}\n'
        elif kind == 2:
            content = token[: draw.randrange(len(token))]
        elif kind == 3:
            content = token + draw.choice([b"[", b'{"a":', b'"', b"9"]) * draw.randrange(300_000)
        elif kind == 4:
            hello = (
                b'{"kind": "hello", "rank": 0, "machine": null, "pid": 1, "stacks": [0, -1], "where": ""}\n'
            )
            content = token + hello[draw.randrange(len(hello)) :] + hello
        connection = socket.create_connection(("127.0.0.1", hub.port), 5)
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            if kind == 5:  # slowly
                for each in content[:5]:
                    connection.sendall(bytes([each]))
            else:
                connection.sendall(content)
        open_ones.append(connection)
        if len(open_ones) > 40 or draw.random() < 0.3:
            open_ones.pop(draw.randrange(len(open_ones))).close()
        for each in ranks:
            each.say("beat")
            each.line.receive()
    for connection in open_ones:
        connection.close()
    return count


def test_random_bytes_end_nothing(hub: Hub, ranks: list[Rank]) -> None:
    assert fuzz(hub, ranks, 1.0, seed=20) > 10
    names_the_right_cause(hub, ranks)


@pytest.mark.extended
def test_random_bytes_end_nothing_for_a_minute(hub: Hub, ranks: list[Rank]) -> None:
    assert fuzz(hub, ranks, 60.0, seed=random.SystemRandom().randrange(1 << 32)) > 1000
    names_the_right_cause(hub, ranks)


def beats_until_decided(hub: Hub, ranks: list[Rank], states: list[dict[str, Any]], seconds: float) -> bool:
    """Let ranks say the same again and again; whether the hub decides on a cause."""
    deadline = time.monotonic() + seconds
    while hub.cause is None and time.monotonic() < deadline:
        for each, state in zip(ranks, states, strict=True):
            each.say("beat", **state)
            each.line.receive()
        time.sleep(0.05)
    return hub.cause is not None


WAITS = {"phase": Phase.WAITS, "place": "barrier (train.py:9)"}
HOOK = "in training, after update 3, in on_step_end of Acts"
BACKWARD = "in training, after update 3, in the backward"


@pytest.mark.parametrize("hub", [LIMIT], indirect=True)
@pytest.mark.parametrize(
    ("first", "second", "told", "behind"),
    [
        (
            {"progress": 8, "where": BACKWARD, **WAITS},
            {"progress": 7, "where": HOOK},
            f"rank 1 is behind, {HOOK}; rank 0 waits in barrier (train.py:9), {BACKWARD}",
            1,
        ),
        (
            {"progress": 7, "where": HOOK},
            {"progress": 7, "where": HOOK, **WAITS},
            f"rank 0 is behind, {HOOK}; rank 1 waits in barrier (train.py:9), {HOOK}",
            0,
        ),
        (
            {"progress": 7, "where": BACKWARD, **WAITS},
            {"progress": 7, "where": BACKWARD, **WAITS},
            f"ranks 0 and 1 wait in barrier (train.py:9), {BACKWARD}",
            0,
        ),
    ],
)
def test_a_hang_names_the_rank_that_is_behind(
    hub: Hub, ranks: list[Rank], first: dict[str, Any], second: dict[str, Any], told: str, behind: int
) -> None:
    assert beats_until_decided(hub, ranks, [first, second], 20)
    assert hub.cause is not None
    assert (hub.cause.kind, hub.cause.rank, str(hub.cause)) == (
        "hang",
        behind,
        f"no progress for 0.5 s; {told}",
    )


@pytest.mark.parametrize("hub", [LIMIT], indirect=True)
@pytest.mark.parametrize("name", ["progress", "signs"])
def test_whatever_moves_on_one_rank_is_progress(hub: Hub, ranks: list[Rank], name: str) -> None:
    for number in range(6):
        assert not beats_until_decided(hub, ranks, [{}, {name: number}], LIMIT / 2), str(hub.cause)


@pytest.mark.parametrize("hub", [LIMIT], indirect=True)
def test_a_phase_without_signs_has_more_time_and_an_end(hub: Hub, ranks: list[Rank]) -> None:
    """A compilation, a save or a load on one rank, for which the other waits."""
    states = [{"phase": Phase.OPAQUE, "where": "in a save"}, WAITS]
    assert not beats_until_decided(hub, ranks, states, 2 * LIMIT)
    assert beats_until_decided(hub, ranks, states, 20)
    assert "rank 0 is behind, in a save; rank 1 waits" in str(hub.cause)


@pytest.mark.parametrize("hub", [LIMIT], indirect=True)
def test_the_body_of_a_loop_has_no_limit_while_all_ranks_are_in_it(hub: Hub, ranks: list[Rank]) -> None:
    outside = {"phase": Phase.OUTSIDE, "where": "after update 3"}
    assert not beats_until_decided(hub, ranks, [outside, outside], 3 * LIMIT)
    assert beats_until_decided(hub, ranks, [outside, {**WAITS, "where": "after update 3"}], 20)
    assert "rank 0 is behind, after update 3; rank 1 waits" in str(hub.cause)
