"""What the ranks tell each other beside the training: lines of JSON, and the first cause of a failure."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drivetrain.distributed.silence import machine
from drivetrain.distributed.sockets import kept_to_this_process
from drivetrain.errors import RankFailure, StrategyError

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
    def of_error(cls, rank: int, where: str, error: BaseException, besides: str = "") -> Cause:
        """The cause that an error on this rank may be, and what else there is to say of it."""
        what = "".join(traceback.format_exception_only(type(error), error)).strip()
        what = f"{what}. {besides}" if besides else what
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

    @property
    def is_interrupt(self) -> bool:
        """Whether it is no more than an interrupt, of which the stacks tell nothing."""
        return self.kind == "error" and self.what.startswith("KeyboardInterrupt")

    def failure(self, more: str = "") -> RankFailure:
        """As an error for the other ranks; where the traceback is known, that is its cause.

        Args:
            more: A line that goes before what has happened.
        """
        failure = RankFailure(str(self))
        failure.__suppress_context__ = True  # what this rank noticed of it says nothing
        if self.frames or more:
            frames = f"on rank {self.rank}:\n{self.frames.rstrip()}" if self.frames else ""
            failure.__cause__ = _Remote("\n".join(filter(None, (frames, more))))
        return failure

    def block(self, more: str = "") -> str:
        """The last lines of the program, with one more before what has happened."""
        frames = f"drivetrain: on rank {self.rank}:\n{self.frames}" if self.frames else ""
        return f"{frames}{f'drivetrain: {more}' + chr(10) if more else ''}drivetrain: {self}\n"


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


def is_voluntary(error: BaseException) -> bool:
    """Whether an end is one that the program wants, such as `sys.exit()`; it is no failure in itself."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


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
            if not self._has_more():
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

    def _has_more(self) -> bool:
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([self.socket], [], [], 0)[0])
        poll = select.poll()  # which takes any number of open files
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """End it."""
        self.socket.close()


def connect(rank: int, offer: dict[str, Any], address: str | None, timeout: float) -> Line:
    """A line to rank 0.

    Args:
        rank: This process.
        offer: What rank 0 has put into the store: its "machine", "port" and "hosts".
        address: Where the launcher says that it is, if it does.
        timeout: In seconds.

    Raises:
        StrategyError: It cannot be reached.
    """
    near = not offer["hosts"] or (offer["machine"] is not None and offer["machine"] == machine())
    hosts = ["127.0.0.1"] if near else [*filter(None, [address]), *offer["hosts"]]
    errors = []
    for host in dict.fromkeys(hosts):
        try:
            return Line(socket.create_connection((host, offer["port"]), timeout), timeout)
        except OSError as error:
            errors.append(f"{host}: {error}")
    raise StrategyError(
        f"rank {rank} cannot reach rank 0 at port {offer['port']} ({'; '.join(errors)}). The machines of a"
        " job must be able to reach each other at any port"
    )


def own_hosts() -> list[str]:
    """Where this machine may be reached, the likeliest first."""
    name = socket.gethostname()
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    return [name, *(each for each in found if not each.startswith("127.") and each != "::1")]
