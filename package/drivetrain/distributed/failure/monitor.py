"""Rank 0's part of the failure channel: it receives from all ranks, and decides what failed first."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drivetrain.core.messages import logger
from drivetrain.distributed.failure.heartbeat import ABOVE, DIED, PATIENCE, UNREACHABLE, Heartbeat
from drivetrain.distributed.failure.location import Phase
from drivetrain.distributed.failure.messages import TOKEN_BYTES, Cause, Line, LocalLine, Timing, at
from drivetrain.distributed.failure.watchdog import ProgressTimeout
from drivetrain.distributed.interfaces import listen
from drivetrain.distributed.launch.children import ending, started, wait_for
from drivetrain.distributed.sockets import closed_in_forks, is_unreachable, open_more_files, out_of_files
from drivetrain.distributed.stopping import Poll

_LOG = logger(__name__)

_TOLD = 2
"""Ticks without progress after which every rank has reported its location."""

_WAITING = 64
"""Connections that may wait to authenticate themselves, in addition to one for each rank."""

_SHOWN = 8
"""Ranks that a message names one by one."""


@dataclass(eq=False)
class _Newcomer:
    """A connection that has not said which rank it is, when it came, and what it has sent of the token."""

    line: Line
    since: float
    said: bytes = b""
    has_token: bool = False


@dataclass
class _Peer:
    """The state of a rank: its connection, its heartbeat, and what its last beat says.

    `signs` is the progress in its last beat, `phase` how it counts, `collective` the one that it waits in.
    """

    rank: int
    line: Line | LocalLine
    heartbeat: Heartbeat
    where: str = ""
    progress: int | None = None
    signs: Any = None
    phase: Phase = Phase.WORKS
    collective: str = ""
    state: str = "here"  # then "left" after a goodbye, or "gone"


class Monitor:
    """Receives from all ranks, in the thread of rank 0's channel, which calls `turn`.

    It reads nothing else from a connection before the token, and whatever a connection sends, it can end only
    itself.

    Args:
        host: The address to listen on; empty for all of this machine's.
        token: The secret that a rank must send, of `TOKEN_BYTES` characters; None makes one.

    Attributes:
        port: The port it listens on.
        token: The secret that a rank must send.
        cause: The first failure, once it is decided.
        finished: Set when no rank but this one is left.
        selector: What `turn` waits for. Another entry is read by its owner, who gives a callable as its data.
    """

    def __init__(
        self,
        world_size: int,
        host: str,
        timing: Timing,
        hang_timeout: float | None,
        clock: Callable[[], float] = time.monotonic,
        token: str | None = None,
    ) -> None:
        self._world_size = world_size
        open_more_files()
        self._timing = timing
        self._clock = clock
        self._tick = timing.heartbeat / 5
        self._following = clock() + self._tick
        self.limit(hang_timeout)
        self._server = closed_in_forks(listen(host))
        self._server.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._peers: dict[int, _Peer] = {}
        self._unknown: list[_Newcomer] = []
        self._poll = Poll(world_size)
        self._aside: Cause | None = None  # probably the consequence of another failure
        self._aside_until = 0.0
        self.cause: Cause | None = None
        self._ticks = self._still = 0
        self.finished = threading.Event()
        self.port = int(self._server.getsockname()[1])
        self.token = token or os.urandom(TOKEN_BYTES // 2).hex()

    def limit(self, hang_timeout: float | None) -> None:
        """Set how long no rank may make progress; None sets no limit."""
        self._hang_timeout = hang_timeout
        self._limit = None if hang_timeout is None else ProgressTimeout(hang_timeout, self._timing.opaque)

    def turn(self) -> None:
        """Wait a moment for what arrives, read it, and check what is due."""
        for key, _ in self.selector.select(min(0.05, self._tick)):
            if callable(key.data):
                key.data()
            elif isinstance(key.data, _Newcomer) and not key.data.has_token:
                self._read_token(key.data)
            else:
                self._hear(key.data)
        if 0 in self._peers:  # which has no socket
            self._hear(self._peers[0])
        if self._clock() >= self._following:
            self._following = self._clock() + self._tick
            self._look()
        if self._aside is not None and self.cause is None and self._clock() >= self._aside_until:
            self._decide(self._explained(self._aside))
        if self.is_over():
            self.finished.set()

    def close(self) -> None:
        """Close the monitor; without a failure, the ranks that are still connected learn that it is none."""
        try:
            if self.cause is None:
                self._end_all()
        finally:
            everybody: list[_Newcomer | _Peer] = [*self._peers.values(), *self._unknown]
            for each in everybody:
                each.line.close()
            self.selector.close()
            self._server.close()
            self.finished.set()

    def _end_all(self) -> None:
        # Closing a connection with unread data discards what was sent: wait until the ranks have read it.
        self._broadcast(kind="end")
        deadline = time.monotonic() + 1.0
        here = [each for each in self._peers.values() if each.state == "here" and each.rank]
        while here and time.monotonic() < deadline:
            here = [each for each in here if each.line.is_open()]
            time.sleep(0.01)

    def is_over(self) -> bool:
        """Return whether all ranks have said goodbye, or only rank 0 is left after a failure.

        A rank that has not joined yet, because it is slower than the one that failed, is still to be told.
        """
        peers = self._peers.values()
        if self.cause is None:
            return len(peers) == self._world_size and all(each.state == "left" for each in peers)
        never_came = self.cause.rank not in self._peers
        have_ended = all(each.state != "here" for each in peers if each.rank)
        return len(peers) + never_came == self._world_size and have_ended

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:  # the client has withdrawn the connection
            return
        except OSError as error:
            # The connection failed before it was accepted (accept(2) lists the reasons), or no descriptor is
            # free. Then the server stays ready, and the oldest that has not said its rank makes room.
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._unknown and self.cause is None:
                self._decide(Cause("error", 0, "", f"{error.strerror}: {out_of_files(self._world_size)}"))
            self._drop_oldest()
            time.sleep(0.02)
            return
        newcomer = _Newcomer(Line(connection, timeout=0.0), self._clock())
        self._unknown.append(newcomer)
        self.selector.register(connection, selectors.EVENT_READ, newcomer)
        if len(self._unknown) > self._world_size + _WAITING:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self._unknown:
            self._drop(min(self._unknown, key=lambda each: each.since))

    def _drop(self, source: _Newcomer | _Peer) -> None:
        if isinstance(source.line, Line):
            with contextlib.suppress(KeyError, ValueError):  # already closed
                self.selector.unregister(source.line.socket)
        source.line.close()
        if isinstance(source, _Newcomer) and source in self._unknown:
            self._unknown.remove(source)

    def _read_token(self, newcomer: _Newcomer) -> None:
        """Compare the first bytes of a connection with the token; nothing else is read from it."""
        wanted = TOKEN_BYTES + 1
        try:
            found = newcomer.line.socket.recv(wanted - len(newcomer.said))
        except BlockingIOError:
            return
        except OSError:
            found = b""
        newcomer.said += found
        if found and len(newcomer.said) < wanted:
            return
        if not hmac.compare_digest(newcomer.said, f"{self.token}\n".encode()):
            self._drop(newcomer)
        else:
            newcomer.has_token = True
            newcomer.line.socket.settimeout(self._timing.heartbeat)

    def _hear(self, source: _Newcomer | _Peer) -> None:
        trouble: Exception | None = None
        try:
            messages = source.line.receive()
            for each in messages or ():
                if isinstance(source, _Peer):
                    self._take(source, each)
                else:
                    peer = self.add(source.line, each)
                    self._unknown.remove(source)
                    self.selector.modify(source.line.socket, selectors.EVENT_READ, peer)
                    source = peer
        except Exception as error:  # the other end has sent something that is no message of ours
            messages, trouble = None, error
        if messages is not None:
            return
        self._drop(source)
        if isinstance(source, _Peer) and source.state == "here":
            source.state = "gone"
            if self.cause is None and (self._aside is None or self._aside.rank != source.rank):
                what = _death(source.rank) if trouble is None else f"its line to rank 0 broke ({trouble!r})"
                what = UNREACHABLE if is_unreachable(source.line.broken) else what
                self._decide(Cause("lost", source.rank, source.where, what))

    def add(self, line: Line | LocalLine, hello: dict[str, Any]) -> _Peer:
        """Add a rank by its first message."""
        rank = int(hello["rank"])
        if not 0 <= rank < self._world_size or rank in self._peers:
            raise ValueError(f"rank {rank} is connected already, or is none of {self._world_size}")
        heartbeat = Heartbeat(hello["machine"], int(hello["pid"]), self._timing.heartbeat)
        peer = self._peers[rank] = _Peer(rank, line, heartbeat, str(hello["where"]))
        line.send(**self._beat())
        if self._poll.is_open:
            line.send(kind="hold", round=self._poll.round)
        if self.cause is not None:
            line.send(kind="cause", cause=self.cause.to_json())
        return peer

    def _take(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.heartbeat.beat()
        peer.where, peer.collective = str(message["where"]), str(message["collective"])
        peer.phase = Phase(message["phase"])
        signs = (message["progress"], message["signs"])
        if signs != peer.signs:
            peer.progress, peer.signs = message["progress"], signs
            self._still = 0
            if self._limit is not None:
                self._limit.end()
        if message["kind"] == "beat" and peer.rank == 0:
            self._broadcast(**self._beat())
        elif message["kind"] == "bye":
            peer.state = "left"
            self._poll.leave(peer.rank, int(message["passed"]))
        elif message["kind"] == "held":
            self._poll.note(peer.rank, int(message["passed"]), message["asked"])
        elif message["kind"] == "ask" and self._poll.open(peer.rank, message["round"], message["asked"]):
            self._broadcast(kind="hold", round=self._poll.round)
        elif message["kind"] == "cause" and self.cause is None:
            cause = Cause.from_json(message["cause"])
            if cause.kind != "consequence":
                self._decide(cause)
            elif self._aside is None:
                self._aside_until = self._clock() + self._timing.aside
                self._aside = cause
        decision = self._poll.decision()
        if decision is not None:
            self._broadcast(kind="meet", **decision)

    def _look(self) -> None:
        """Once per tick, check for ranks that are lost or make no progress."""
        self._ticks += 1
        self._still += 1
        now = self._clock()
        for unknown in [each for each in self._unknown if now - each.since > self._timing.joining]:
            self._drop(unknown)
        if self.cause is not None:
            return
        here = [each for each in self._peers.values() if each.state == "here"]
        cause = self._lost_of(here) or self._missing() or self._hang_of(here)
        if cause is not None:
            self._decide(cause)

    def _lost_of(self, here: list[_Peer]) -> Cause | None:
        """Return the loss of a rank that does not answer, or does not read."""
        for each in here:
            lost = each.heartbeat.tick() if each.rank else None
            if isinstance(each.line.broken, TimeoutError) and not is_unreachable(each.line.broken):
                lost = f"it did not read for {self._timing.heartbeat:g} s what rank 0 sent"
            if lost is not None:
                return Cause("lost", each.rank, each.where, lost)
        return None

    def _missing(self) -> Cause | None:
        """Return the loss of a rank that has not joined, once it has ended or is too late."""
        missing = sorted(set(range(self._world_size)) - self._peers.keys())
        ended = [each for each in missing if each in started and started[each].poll() is not None]
        if ended:
            return Cause("lost", ended[0], "", _death(ended[0]))
        if missing and self._ticks >= 5 * PATIENCE:
            text = f"it has not joined the failure channel within {PATIENCE * self._timing.heartbeat:g} s"
            return Cause("lost", missing[0], "", text)
        return None

    def _hang_of(self, here: list[_Peer]) -> Cause | None:
        """Return a hang over the limit; warn of one until the first step."""
        if len(self._peers) < self._world_size or not here:
            return None
        if self._still == round(self._timing.late / self._tick) + _TOLD:
            self._name_late(here)
        if self._limit is None:
            return None
        is_hang = self._limit.add(self._tick, [each.phase for each in here])
        return self._hang(here) if is_hang and self._still >= _TOLD else None

    def _name_late(self, here: list[_Peer]) -> None:
        """Say until the first step, before which progress is None, which ranks the others wait for."""
        behind = self._late_ranks(here)
        if behind and any(each.progress is None for each in here):
            others = _locations([each for each in self._sorted() if each not in behind])
            seconds = self._still * self._tick
            _LOG.warning(f"no progress for {seconds:g} s; {_locations(behind, are_behind=True)}; {others}")
            for each in behind[:_SHOWN]:
                each.line.send(kind="stacks")

    def _beat(self) -> dict[str, Any]:
        return {"kind": "beat", "where": self._peers[0].where}  # it was the first to join

    def _sorted(self) -> list[_Peer]:
        return sorted(self._peers.values(), key=lambda each: each.rank)

    def _late_ranks(self, here: list[_Peer]) -> list[_Peer]:
        """Return the ranks that the others wait for: those with less progress, or else those not waiting."""
        furthest = max(each.progress or 0 for each in self._peers.values())
        found = [each for each in self._sorted() if (each.progress or 0) < furthest]
        if not found:
            found = [each for each in sorted(here, key=lambda each: each.rank) if each.phase != Phase.WAITS]
        return found if len(found) < len(self._peers) else []

    def _hang(self, here: list[_Peer]) -> Cause:
        behind = self._late_ranks(here)
        begin = f"no progress for {self._hang_timeout:g} s"
        if not behind:
            stuck = tuple(range(min(self._world_size, _SHOWN)))
            return Cause("hang", 0, "", f"{begin}; {_locations(self._sorted())}", stuck=stuck)
        others = [each for each in self._sorted() if each not in behind]
        what = f"{begin}; {_locations(behind, are_behind=True)}; {_locations(others)}"
        stuck = tuple(each.rank for each in behind if each.state == "here") or (here[0].rank,)
        return Cause("hang", behind[0].rank, behind[0].where, what, stuck=stuck[:_SHOWN])

    def _explained(self, found: Cause) -> Cause:
        """Return the failure to report for a consequence if no other cause has arrived."""
        left = next((each for each in self._peers.values() if each.state == "left"), None)
        if left is None:
            return found
        waiting = f"rank {found.rank}, {at(found.where or 'its step')},"
        text = f"it had ended when {waiting} waited for it ({found.what.partition('. ')[0]})"
        return Cause("lost", left.rank, left.where, text, found.frames)

    def _decide(self, cause: Cause) -> None:
        lost = self._peers.get(cause.rank)
        if cause.kind == "lost" and lost is not None and lost.state == "here":
            lost.heartbeat.end_process()
            lost.state = "gone"
        self.cause = cause
        self._broadcast(kind="cause", cause=cause.to_json())

    def _broadcast(self, **message: Any) -> None:
        for each in self._peers.values():
            if each.state != "gone":  # rank 0 may have said goodbye, and still listens
                each.line.send(**message)


def _named(ranks: list[int]) -> str:
    """Return ranks as part of a sentence: "rank 3", "ranks 0, 1 and 3", "ranks 0, 1, 2 and 61 more"."""
    shown = [str(each) for each in ranks[:_SHOWN]]
    if len(ranks) > _SHOWN:
        shown[-1] = f"{len(ranks) - _SHOWN + 1} more"
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def _locations(peers: list[_Peer], are_behind: bool = False) -> str:
    """List where ranks are: "rank 1 is behind, at step 7", "rank 0 waits in barrier (train.py:9), ..."."""
    locations: dict[tuple[str, str, str], list[int]] = {}
    for each in peers:
        waits = each.phase == Phase.WAITS and each.state == "here"
        location = at(each.where or "its step")
        location = f"in {each.collective}, {location}" if waits else location
        if each.state == "left":
            one, several, location = "has ended", "have ended", f", {location}"
        elif are_behind:
            one, several, location = "is behind", "are behind", f", {location}"
        else:
            one, several, location = *(("waits", "wait") if waits else ("is", "are")), f" {location}"
        locations.setdefault((one, several, location), []).append(each.rank)
    listed = [
        f"{_named(ranks)} {several if len(ranks) > 1 else one}{location}"
        for (one, several, location), ranks in list(locations.items())[:_SHOWN]
    ]
    more = [f"{len(locations) - _SHOWN} other locations"] if len(locations) > _SHOWN else []
    return "; ".join([*listed, *more])


def _death(rank: int | None) -> str:
    """Return how a rank ended, as far as its parent, if that is this process, can tell."""
    child = started.get(rank) if rank is not None else None
    if child is None or wait_for(
        [child], 0.3
    ):  # its connection closes a little before its exit code is known
        return DIED
    code = child.poll() or 0
    return f"it {ending(code)}" + (f"; {ABOVE}" if code == -signal.SIGABRT else "")
