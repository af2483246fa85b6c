"""What the ranks tell each other beside the training: lines of JSON, and the first cause of a failure."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import threading
import traceback
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.errors import RankFailure

_LONGEST = 1 << 20
"""Bytes of a line; a longer one is nobody's who speaks this protocol."""

_FRAMES = 6
"""Frames of a traceback that travel; the rank prints all of them itself."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|timeout|gloo.*transport"
    r"|(nccl|communicator|process ?group).*abort|remote process (exited|has terminated)|heartbeat monitor",
    re.IGNORECASE | re.DOTALL,
)
"""How back ends complain of a rank that is gone."""


def at(where: str) -> str:
    """A place in a sentence: "at update 17"; "in training, after update 17" as it is."""
    return where if where.startswith(("at ", "in ", "after ", "before ")) else f"at {where}"


@dataclass(frozen=True)
class Cause:
    """Why a job fails.

    Attributes:
        kind: "error" for one that was raised, "consequence" for one that another rank's end has probably
            brought about, "lost" for a rank that died or stopped, "deadlock" where all ranks wait for one
            another, "hang" where nobody makes progress.
        rank: Where; -1 where it is all of them.
        where: How far that rank was, such as "update 17" or "in training, after update 17"; empty when that
            is not known.
        what: What happened there.
        frames: The end of the traceback.
        stuck: With a hang, the ranks whose stacks tell more.
    """

    kind: str
    rank: int
    where: str
    what: str
    frames: str = ""
    stuck: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind in ("hang", "deadlock"):
            return self.what
        heard = "last heard of " if self.kind == "lost" else ""
        place = f", {heard}{at(self.where)}" if self.where else ""
        return f"rank {self.rank} failed first{place}: {self.what}"

    @classmethod
    def of_error(cls, rank: int, where: str, error: BaseException) -> Cause:
        """The cause that an error on this rank may be."""
        what = "".join(traceback.format_exception_only(type(error), error)).strip()
        where_raised = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        kind = "consequence" if is_consequence(error) else "error"
        return cls(kind, rank, where, what, "".join(traceback.format_list(where_raised)))

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Cause:
        """What `to_json` gave."""
        return cls(**{**found, "stuck": tuple(found["stuck"])})

    def failure(self) -> RankFailure:
        """As an error for the other ranks; where the traceback is known, that is its cause."""
        failure = RankFailure(str(self))
        failure.__suppress_context__ = True  # what this rank noticed of it says nothing
        if self.frames:
            failure.__cause__ = _Remote(f"on rank {self.rank}:\n{self.frames.rstrip()}")
        return failure

    def block(self) -> str:
        """The last lines of the program."""
        frames = f"drivetrain: on rank {self.rank}:\n{self.frames}" if self.frames else ""
        return f"{frames}drivetrain: {self}\n"


class _Remote(Exception):  # noqa: N818 - shown in tracebacks, where it stands for another process's
    """Another process's traceback."""


def is_consequence(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone."""
    distributed = torch.distributed
    of_torch = (distributed.DistError,) if distributed.is_available() else ()
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, (*of_torch, ConnectionError)):
            return True
        if isinstance(each, RuntimeError) and _CONSEQUENCE.search(str(each)):
            return True
        if any("happened on rank" in note for note in getattr(each, "__notes__", ())):
            return True
        each = each.__cause__
    return False


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_opening = threading.Lock()


def _close_copies() -> None:
    for each in list(_open):
        each.close()


if hasattr(os, "register_at_fork"):
    # A worker that a rank forks would hold a copy of its line, and so hide that the rank itself has died.
    os.register_at_fork(after_in_child=_close_copies)


def kept_to_this_process(line: socket.socket) -> socket.socket:
    """The socket, which processes that are forked from this one shall not hold."""
    with _opening:
        _open.add(line)
    return line


def own_connections() -> set[int]:
    """The descriptors of the failure channel's own sockets in this process."""
    with _opening:
        return {each.fileno() for each in _open}


class Line:
    """Messages to and from one other process. Any thread may send; one receives.

    Args:
        connection: A connected socket.
        timeout: Seconds that sending may take.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket = kept_to_this_process(connection)
        self.socket.settimeout(timeout)
        # A goodbye that waits in the system for more to send would be lost when the line is closed after it.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send a message; False when nobody can take it any more."""
        try:
            with self._sending:
                self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """What has arrived, perhaps nothing yet; None when the other end is closed.

        Raises:
            ValueError: It is no message.
        """
        try:
            if not select.select([self.socket], [], [], 0)[0]:
                return []
            found = self.socket.recv(1 << 16)
        except (OSError, ValueError):  # the latter for a socket that was closed here
            return None
        if not found:
            return None
        *lines, self._rest = (self._rest + found).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise ValueError("a line without an end")
        messages = [json.loads(each) for each in lines]
        if not all(isinstance(each, dict) for each in messages):
            raise ValueError("not a message")
        return messages

    def close(self) -> None:
        """End it."""
        self.socket.close()


def machine() -> str | None:
    """This machine, as the number of a process is known in; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text(encoding='utf-8').strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def state_of(pid: int) -> str:
    """What a process of this machine does: "gone", "stopped" or "alive"."""
    try:
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return "gone"
    return {"T": "stopped", "Z": "gone", "X": "gone"}.get(state, "alive")
