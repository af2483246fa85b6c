"""Rank 0's part of the failure channel: hears of all ranks, and decides what failed first."""

from __future__ import annotations

import hmac
import math
import os
import selectors
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from drivetrain.distributed.children import ending, started
from drivetrain.distributed.failure_wire import Cause, Line, at
from drivetrain.distributed.silence import ABOVE, DIED, PATIENCE, Silence
from drivetrain.distributed.sockets import kept_to_this_process
from drivetrain.distributed.stacks import asked
from drivetrain.distributed.stopping import Poll

_ASIDE = 2.0
"""Seconds that an error which is probably a consequence waits for its cause."""

_FRESH = 2
"""Ticks for which it counts what a rank has said of itself. All must be at rest for longer than that."""

_TOLD = 4
"""Ticks without progress after which the ranks at rest are known: each has looked twice, and said so."""

_SHOWN = 8
"""Ranks that are named one by one."""


@dataclass
class _Peer:
    """What is known of a rank: its line, how silent it is, and how it does.

    `looks` and `asleep` are what its last beat told, at the time `heard`; `ended` counts the ticks since its
    goodbye. `asks` is the signal by which its process `pid` writes its stacks, and where.
    """

    rank: int
    line: Line
    silence: Silence
    where: str = ""
    progress: int | None = None
    looks: int = 0
    heard: float = 0.0
    ended: int = 0
    place: str = ""
    asleep: int = 0
    pid: int = 0
    asks: tuple[int, int] = (0, -1)
    state: str = "here"  # then "left" after a goodbye, "gone" after anything else


class Hub:
    """Listens to all ranks in a thread of its own.

    Args:
        world_size: How many ranks there are.
        local: Whether all of them are on this machine.
        timeout: Seconds of silence after which a stopped rank counts as lost; see `Silence`.
        hang_timeout: Seconds without any rank's progress that count as a hang; None for no limit.
        deadlock_timeout: Seconds for which all ranks must be seen to wait for one another, and three fifths
            of `timeout` at least; None to let them.

    Attributes:
        port: Where it listens.
        token: What a rank has to know.
        cause: What failed first, once that is decided.
        had: The stacks of ranks that were ended because they did not answer.
        finished: Set when no rank but this one is left.
    """

    def __init__(
        self,
        world_size: int,
        local: bool,
        timeout: float,
        hang_timeout: float | None,
        deadlock_timeout: float | None,
    ) -> None:
        self._world_size = world_size
        self._timeout = timeout
        self._tick = timeout / 5
        self._hang_timeout = hang_timeout
        least = _FRESH + 1
        self._looks = max(least, math.ceil(deadlock_timeout / self._tick)) if deadlock_timeout else None
        self._server = kept_to_this_process(_listen(local))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}
        self._poll = Poll(world_size)
        self._aside: list[Cause] = []
        self._aside_until = 0.0
        self.cause: Cause | None = None
        self.had: dict[int, str] = {}
        self._ticks = self._still = 0
        self._leaving = threading.Event()
        self.finished = threading.Event()
        self.port = int(self._server.getsockname()[1])
        self.token = os.urandom(16).hex()
        self._thread = threading.Thread(target=self._run, name="drivetrain-failure-hub", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Close; ranks that are still there are told that this is no failure."""
        self._leaving.set()
        self._thread.join()

    def _run(self) -> None:
        following = time.monotonic() + self._tick
        try:
            while not (self._leaving.is_set() or self._is_over()):
                for key, _ in self._selector.select(min(0.05, self._tick)):
                    if key.data is None:
                        self._accept()
                    else:
                        self._hear(key.data)
                if time.monotonic() >= following:
                    following = time.monotonic() + self._tick
                    self._look()
                if self._aside and self.cause is None and time.monotonic() >= self._aside_until:
                    self._decide(self._of_aside())
            if self.cause is None:
                self._dismiss()
        finally:
            for each in self._peers.values():
                each.line.close()
            self._selector.close()
            self._server.close()
            self.finished.set()

    def _dismiss(self) -> None:
        # A connection that is closed with something unread takes back what was sent: wait until it was heard.
        self._tell(kind="end")
        deadline = time.monotonic() + 1.0
        here = [each for each in self._peers.values() if each.state == "here" and each.rank]
        while here and time.monotonic() < deadline:
            here = [each for each in here if each.line.receive() is not None]
            time.sleep(0.01)

    def _is_over(self) -> bool:
        """Whether all ranks have said goodbye, or rank 0 is the only one left after a failure."""
        if self.cause is not None:
            return all(each.state != "here" for each in self._peers.values() if each.rank)
        return len(self._peers) == self._world_size and all(p.state == "left" for p in self._peers.values())

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        line = Line(connection, self._timeout)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, source: Line | _Peer) -> None:
        line = source.line if isinstance(source, _Peer) else source
        try:
            messages = line.receive()
            for each in messages or ():
                if isinstance(source, _Peer):
                    self._take(source, each)
                else:
                    source = self._welcome(source, each)
        except (ValueError, KeyError, TypeError):  # somebody who is not one of us
            messages = None
        if messages is not None:
            return
        self._selector.unregister(line.socket)
        line.close()
        if isinstance(source, _Peer) and source.state == "here":
            source.state = "gone"
            if self.cause is None and not any(each.rank == source.rank for each in self._aside):
                self._decide(Cause("lost", source.rank, source.where, _death(source.rank)))

    def _welcome(self, line: Line, hello: dict[str, Any]) -> _Peer:
        if not hmac.compare_digest(str(hello["token"]), self.token):
            raise ValueError("a stranger")
        silence = Silence(hello["machine"], int(hello["pid"]), self._timeout)
        peer = _Peer(int(hello["rank"]), line, silence, str(hello["where"]))
        peer.pid = int(hello["pid"])
        number, descriptor = hello["stacks"]
        peer.asks = (int(number), int(descriptor))
        self._peers[peer.rank] = peer
        self._selector.modify(line.socket, selectors.EVENT_READ, peer)
        line.send(**self._beat())
        if self._poll.is_open:
            line.send(kind="hold")
        if self.cause is not None:
            line.send(kind="cause", cause=self.cause.to_json())
        return peer

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.silence.end()
        peer.where = str(message["where"])
        if message["kind"] == "beat":  # others are sent at any time after the last look
            peer.looks, peer.heard = int(message["looks"]), time.monotonic()
            peer.asleep = int(message["asleep"])
        peer.place = str(message["place"])
        if message["progress"] != peer.progress:
            peer.progress = message["progress"]
            self._still = 0
        if message["kind"] == "bye":
            peer.state = "left"
            self._poll.note(peer.rank, int(message["passed"]))
        elif message["kind"] == "held":
            self._poll.note(peer.rank, int(message["passed"]), message["asked"])
        elif message["kind"] == "stop" and self._poll.open(peer.rank, str(message["asked"])):
            self._tell(kind="hold")
        elif message["kind"] == "cause" and self.cause is None:
            cause = Cause.from_json(message["cause"])
            if cause.kind != "consequence":
                self._decide(cause)
            elif not self._aside:
                self._aside_until = time.monotonic() + _ASIDE
                self._aside.append(cause)
        decision = self._poll.decision()
        if decision is not None:
            self._tell(kind="stop", **decision)

    def _look(self) -> None:
        """Once in a tick: show that rank 0 is alive, and look for ranks that are not, or that stand still."""
        self._tell(**self._beat())
        self._ticks += 1
        self._still += 1
        for each in self._peers.values():
            each.ended += each.state == "left"
        if self.cause is not None:
            return
        here = [each for each in self._peers.values() if each.state == "here"]
        for each in here:
            lost = each.silence.tick() if each.rank else None
            if lost is not None:
                self._decide(Cause("lost", each.rank, each.where, lost))
                return
        missing = sorted(set(range(self._world_size)) - self._peers.keys())
        if missing:
            self._still = 0
            ended = [each for each in missing if each in started and started[each].poll() is not None]
            if ended:
                self._decide(Cause("lost", ended[0], "", _death(ended[0])))
            elif self._ticks >= 5 * PATIENCE:
                text = f"it has not come to the failure channel within {PATIENCE * self._timeout:g} s"
                self._decide(Cause("lost", missing[0], "", text))
        elif self._looks is not None and self._all_wait(here, self._looks):
            asleep = [each for each in here if each.asleep >= self._looks]
            if not asleep:
                self._decide(self._deadlock())
            elif len(asleep) < len(here):
                self._decide(self._sleep(asleep, here))
        elif self._hang_timeout is not None and self._still * self._tick >= self._hang_timeout and here:
            behind = self._behind()
            if behind or self._still >= _TOLD:
                self._decide(self._hang(self._hang_timeout, behind or self._not_waiting()))

    def _beat(self) -> dict[str, Any]:
        where = self._peers[0].where if 0 in self._peers else ""
        return {"kind": "beat", "where": where}

    def _all_wait(self, here: list[_Peer], looks: int) -> bool:
        """Whether all that are still here have been at rest for so long that nothing can be on its way.

        One that has left the channel has done its part of what the ranks do together: nobody may wait for it.
        It is at rest from its goodbye on, and as long as the others: what one of them has said before that
        tells of a wait which may be over. So may be what was said before all others came to rest. That goes
        by the clock: a call on rank 0 that holds the interpreter keeps its word back, and this thread too.
        """
        oldest = time.monotonic() - looks * self._tick
        told = [each for each in here if each.silence.ticks <= _FRESH and each.heard > oldest]
        if not here or len(told) < len(here) or any(max(each.looks, each.asleep) < looks for each in here):
            return False
        return all(each.ended >= looks for each in self._peers.values() if each.state == "left")

    def _deadlock(self) -> Cause:
        places: dict[str, list[int]] = {}
        for each in self._sorted():
            where = f", {at(each.where)}" if each.where else ""
            place = f"in {each.place}{where}" if each.state == "here" else f"at its end{where}"
            places.setdefault(place, []).append(each.rank)
        listed = "; ".join(f"{_named(ranks)} {place}" for place, ranks in list(places.items())[:_SHOWN])
        return Cause("deadlock", -1, "", f"the ranks wait for one another: {listed}")

    def _sleep(self, asleep: list[_Peer], here: list[_Peer]) -> Cause:
        """One that sleeps, or some, and the others wait."""
        first = min(asleep, key=lambda each: each.rank)
        ranks = sorted(each.rank for each in asleep)
        waiting = min((each for each in here if each not in asleep), key=lambda each: each.rank)
        others = sorted(each.rank for each in here if each not in asleep)
        what = (
            f"{_named(ranks)} will not come back from a {first.place}, {at(first.where or 'its step')};"
            f" {_named(others)} {'waits' if len(others) == 1 else 'wait'} in {waiting.place}"
        )
        return Cause("hang", first.rank, first.where, what, stuck=tuple(ranks[:_SHOWN]))

    def _sorted(self) -> list[_Peer]:
        return sorted(self._peers.values(), key=lambda each: each.rank)

    def _behind(self) -> list[_Peer]:
        """The ranks that have done less than another."""
        furthest = max(each.progress or 0 for each in self._peers.values())
        return [each for each in self._sorted() if (each.progress or 0) < furthest]

    def _not_waiting(self) -> list[_Peer]:
        """The ranks that sleep, or that do not wait for others; none where they all do, or no other does."""
        peers = self._sorted()
        asleep = [each for each in peers if each.asleep]
        found = asleep or [each for each in peers if not each.looks]
        return found if len(found) < len(peers) else []

    def _hang(self, seconds: float, behind: list[_Peer]) -> Cause:
        peers = self._sorted()
        ahead = max(peers, key=lambda each: each.progress or 0)
        if not behind:
            places: dict[str, list[int]] = {}
            for each in peers:
                places.setdefault(each.where, []).append(each.rank)
            where = "; ".join(
                f"{'all ranks' if len(places) == 1 else _named(ranks)} {'is' if len(ranks) == 1 else 'are'}"
                f" {at(place)}"
                for place, ranks in list(places.items())[:_SHOWN]
            )
            every = tuple(range(min(self._world_size, _SHOWN)))
            return Cause("hang", 0, "", f"no progress for {seconds:g} s; {where}", stuck=every)
        listed = "; ".join(
            f"rank {each.rank} {'ended' if each.state == 'left' else 'is'} {at(each.where or 'its step')}"
            for each in behind[:_SHOWN]
        )
        more = f"; {len(behind) - _SHOWN} more are behind" if len(behind) > _SHOWN else ""
        for_them = "for it" if len(behind) == 1 else "for them"
        place = at(ahead.where) if ahead.where != behind[0].where else for_them
        what = f"no progress for {seconds:g} s; {listed}{more}, the others wait {place}"
        stuck = tuple(each.rank for each in behind if each.state == "here") or (ahead.rank,)
        return Cause("hang", behind[0].rank, behind[0].where, what, stuck=stuck)

    def _of_aside(self) -> Cause:
        """What counts when no other cause has come."""
        found = self._aside[0]
        left = next((each for each in self._peers.values() if each.state == "left"), None)
        if left is None:
            return found
        waiting = f"rank {found.rank}, {at(found.where or 'its step')},"
        text = f"it had ended when {waiting} waited for it ({found.what.partition('. ')[0]})"
        return Cause("lost", left.rank, left.where, text, found.frames)

    def _decide(self, cause: Cause) -> None:
        lost = self._peers.get(cause.rank)
        if cause.kind == "lost" and lost is not None and lost.state == "here":
            self.had[lost.rank] = self.ask(lost.rank)  # before anybody looks for what it has not written
            lost.silence.end_process()
            lost.state = "gone"
        self.cause = cause
        self._tell(kind="cause", cause=cause.to_json())

    def ask(self, rank: int) -> str:
        """The stacks of a rank that does not write them itself; empty where they cannot be had."""
        peer = self._peers.get(rank)
        if peer is None or peer.state == "gone" or not peer.silence.is_near or peer.pid == os.getpid():
            return ""
        number, descriptor = peer.asks
        return asked(peer.pid, number, peer.pid, descriptor)

    def _tell(self, **message: Any) -> None:
        for each in self._peers.values():
            if each.state != "gone":  # rank 0 has said goodbye, and is there all the same
                each.line.send(**message)


def _named(ranks: list[int]) -> str:
    """Ranks in a sentence: "rank 3", "ranks 0, 1 and 3", "ranks 0, 1, 2 and 61 more"."""
    shown = [str(each) for each in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown[-1] = f"{len(ranks) - _SHOWN + 1} more"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _death(rank: int | None) -> str:
    """How a rank ended, as far as its parent, if that is this process, can tell."""
    child = started.get(rank) if rank is not None else None
    deadline = time.monotonic() + 0.3  # its line is closed a little before its exit code is known
    while child is not None and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    code = child.poll() if child is not None else None
    if code is None:
        return DIED
    return f"it {ending(code)}" + (f"; {ABOVE}" if code == -signal.SIGABRT else "")


def _listen(local: bool) -> socket.socket:
    if local:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
