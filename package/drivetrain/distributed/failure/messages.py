"""The messages of the failure channel: lines of JSON between each rank and rank 0, and the first cause."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import threading
import traceback
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from drivetrain.core.errors import RankFailure, StrategyError, shown
from drivetrain.distributed.failure.heartbeat import machine
from drivetrain.distributed.sockets import closed_in_forks, keeping_alive

TOKEN_BYTES = 32
"""Length of the token in hexadecimal digits. A rank sends it first, with a newline."""

_LONGEST = 1 << 20
"""Maximum bytes of a line; the monitor closes a connection that sends a longer one."""

_TEXT = 10_000
"""Maximum characters of a text in a message. Four of them fit into a line, whatever characters they have."""

_FRAMES = 6
"""Frames of a traceback that are sent; the rank itself prints all of them."""

_OWN_WORDS = re.compile(r"\bgloo\b|\bnccl\b|process ?group(gloo|nccl)|c10d|\bTCPStore\b", re.IGNORECASE)
"""Words that mark an error message as one of torch's communication libraries."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|timeout|connectFullMesh"
    r"|communicator|abort|remote process (exited|has terminated)|heartbeat monitor",
    re.IGNORECASE,
)
"""Phrases of these libraries for a rank that is gone."""

_TORCH = os.path.join(Path(torch.__file__).parent, "")

_COLLECTIVE = tuple(
    os.path.join(_TORCH, *name.split("/"))
    for name in (
        "distributed/distributed_c10d.py",
        "distributed/_functional_collectives.py",
        "distributed/utils.py",
        "distributed/fsdp/",
        "distributed/tensor/",
        "nn/parallel/distributed.py",
    )
)
"""Files that wait for other ranks. torch's checkpoint code is not among them: it waits for a disk."""

_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")
_OPERATOR = os.path.join(_TORCH, "_ops.py")


@dataclass(frozen=True)
class Timing:
    """The times of the failure channel, in seconds; tests scale them.

    Attributes:
        heartbeat: The time without a heartbeat after which a rank that is known to be stopped or gone counts
            as lost; twelve times as long for one that is idle or cannot be observed.
        joining: How long a connection may take to authenticate itself and to say which rank it is.
        aside: How long an error that is probably a consequence waits for its cause.
        deciding: How long a failing rank waits to learn whether its failure was the first: more than `aside`.
        grace: How long a main thread has to end by itself once another rank has failed.
        unwinding: How much longer it has if it has an error of its own, because files are closed then.
        last: How long rank 0 waits for the others to end, so that its last lines are the last.
        freed: How long rank 0's main thread then has to end by itself. A notebook's must end that way.
        goodbye: How long rank 0, whose threads run the channel, waits at its end for the others.
        late: How long a rank may keep the others waiting in the set-up of a run before a message names it.
        opaque: How much longer than `hang_timeout` a rank may spend in one compilation, save or load, which
            show no progress until they are done.
    """

    heartbeat: float = 5.0
    joining: float = 5.0
    aside: float = 2.0
    deciding: float = 3.0
    grace: float = 1.0
    unwinding: float = 4.0
    last: float = 2.0
    freed: float = 0.5
    goodbye: float = 60.0
    late: float = 10.0
    opaque: float = 3600.0

    def scaled(self, factor: float) -> Timing:
        return Timing(**{each.name: getattr(self, each.name) * factor for each in fields(self)})


TIMING = Timing()
"""The default times of a channel."""


def at(where: str) -> str:
    """Return a location with its preposition: "step 17" becomes "at step 17", "in training" stays."""
    return where if where.startswith(("at ", "in ", "after ", "before ")) else f"at {where}"


def summary(error: BaseException) -> str:
    """Return an error's type and message; of a group also those of the errors in it."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    inside = map(summary, error.exceptions) if isinstance(error, BaseExceptionGroup) else ()
    return ": ".join(filter(None, (text, "; ".join(inside))))


@dataclass(frozen=True)
class Cause:
    """The reason why a job fails.

    Attributes:
        kind: "error" for one that was raised, "consequence" for one that the end of another rank probably
            caused, "lost" for a rank that died or stopped, "hang" if no rank makes progress.
        rank: The rank that failed.
        where: How far that rank was, such as "step 17" or "in training, after step 17"; empty if that is
            not known.
        what: What happened there.
        frames: The end of the traceback.
        stuck: In a hang, the ranks whose stacks are the most useful.
    """

    kind: str
    rank: int
    where: str
    what: str
    frames: str = ""
    stuck: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind == "hang":
            return self.what
        heard = "last heard of " if self.kind == "lost" else ""
        location = f", {heard}{at(self.where)}" if self.where else ""
        return f"rank {self.rank} failed first{location}: {self.what}"

    @classmethod
    def of_error(cls, rank: int, where: str, error: BaseException, besides: str = "") -> Cause:
        """Return the cause for an error on this rank; long texts lose their middle."""
        what = shortened(shown(summary(error)))
        what = f"{what}. {besides}" if besides else what
        where_raised = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        kind = "consequence" if is_consequence(error) else "error"
        return cls(kind, rank, where, what, shortened(shown("".join(traceback.format_list(where_raised)))))

    def is_also(self, error: BaseException | None) -> bool:
        """Return whether a rank's own error is the same one, as for a loss that all ranks judge."""
        return error is not None and f"{type(error).__name__}: {error}" in self.what

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Cause:
        return cls(**{**found, "stuck": tuple(found["stuck"])})

    @property
    def is_interrupt(self) -> bool:
        """Whether the cause is only an interrupt, whose stacks are of no use."""
        return self.kind == "error" and self.what.startswith("KeyboardInterrupt")

    def failure(self, more: str = "") -> RankFailure:
        """Return the error to raise on the other ranks; a known traceback becomes its `__cause__`."""
        failure = RankFailure(str(self))
        failure.__suppress_context__ = True  # this rank's own error is only a consequence
        if self.frames or more:
            frames = f"on rank {self.rank}:\n{self.frames.rstrip()}" if self.frames else ""
            failure.__cause__ = _Remote("\n".join(filter(None, (frames, more))))
        return failure

    def block(self, more: str = "") -> str:
        """Return the last lines of the program, with one more before the failure."""
        frames = f"drivetrain: on rank {self.rank}:\n{self.frames}" if self.frames else ""
        return f"{frames}{f'drivetrain: {more}' + chr(10) if more else ''}drivetrain: {self}\n"


class _Remote(Exception):  # noqa: N818 - shown in tracebacks as another process's traceback
    """Another process's traceback."""


def shortened(text: str) -> str:
    """Return a text short enough to be sent: the middle is replaced by the number of characters left out."""
    if len(text) <= _TEXT:
        return text
    end = _TEXT // 5
    left_out = len(text) - _TEXT + 100  # room for the note about it
    return f"{text[: _TEXT - end - 100]} [... {left_out:,} characters left out ...] {text[-end:]}"


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone.

    Only an error of torch's communication can: one of its own types, one that names gloo, NCCL or torch's
    process groups, or one that was raised inside a collective.
    """
    distributed = torch.distributed
    of_torch = (distributed.DistError,) if distributed.is_available() else ()
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, of_torch):
            return True
        if isinstance(each, (RuntimeError, ConnectionError)) and _is_connection_loss(each):
            return True
        if any("happened on rank" in note for note in getattr(each, "__notes__", ())):
            return True
        each = each.__cause__
    return False


def _is_connection_loss(error: Exception) -> bool:
    text = str(error)
    is_torchs = _OWN_WORDS.search(text) is not None or _raised_in_collective(error)
    return is_torchs and _CONSEQUENCE.search(text) is not None


def _raised_in_collective(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and is_collective(frames[-1])


def is_collective(frame: FrameType) -> bool:
    """Return whether torch waits for other ranks in a frame; a backward that averages gradients counts."""
    if frame.f_code.co_filename == _OPERATOR and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file.startswith(_COLLECTIVE) or (
        file == _BACKWARD and frame.f_code.co_name == "_engine_run_backward"
    )


def is_voluntary(error: BaseException) -> bool:
    """Return whether the program ends by its own will, as by `sys.exit()`, which is no failure."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


class Line:
    """A connection for messages with one other process. Any thread may send; one receives.

    Attributes:
        broken: Why nothing can be sent any more; None while the connection works.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket = keeping_alive(closed_in_forks(connection))
        self.socket.settimeout(timeout)
        # Nagle's algorithm could hold a goodbye back, and it would be lost when the connection is closed.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.broken: OSError | None = None
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send a message, with long texts shortened; returns False if the connection is broken.

        A message that was sent only in part is the last one: the other end could not parse what follows.
        """
        content = json.dumps(_short(message)).encode() + b"\n"
        with self._sending:
            if self.broken is not None:
                return False
            try:
                self.socket.sendall(content)
            except OSError as error:
                self.broken = error
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_WR)
                return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, perhaps none; None if the other end is closed.

        Raises:
            ValueError: The other end has sent something that is no message.
        """
        try:
            if not self._has_more():
                return []
            found = self.socket.recv(1 << 16)
        except OSError as error:
            self.broken = self.broken or error
            return None
        except ValueError:  # a socket that was closed here
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

    def is_open(self) -> bool:
        """Return whether the other end is open; drops what it has sent."""
        with contextlib.suppress(Exception):
            return self.receive() is not None
        return False

    def _has_more(self) -> bool:
        if not hasattr(select, "poll"):  # Windows
            return bool(select.select([self.socket], [], [], 0)[0])
        poll = select.poll()  # unlike select, it takes any file descriptor
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


class LocalLine:
    """Rank 0's connection with itself, which needs no socket: one end. Any thread may send; one receives."""

    broken: OSError | None = None

    def __init__(self, other: LocalLine | None = None) -> None:
        self._received: deque[dict[str, Any]] = deque()
        self.other = LocalLine(self) if other is None else other

    def send(self, **message: Any) -> bool:
        self.other._received.append(message)
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, perhaps none."""
        return [self._received.popleft() for _ in range(len(self._received))]

    def is_open(self) -> bool:
        """Return True: both ends are in this process."""
        return True

    def close(self) -> None:
        """Do nothing."""


def _short(value: Any) -> Any:
    """Return a message with every long text shortened."""
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value


def connect(rank: int, offer: dict[str, Any], address: str | None, timeout: float) -> Line:
    """Return an authenticated connection to rank 0.

    Args:
        offer: Rank 0's entry in the store: its "machine", "port", "token", and the "hosts" to try.
        address: Where rank 0 is, according to the launcher.
    """
    hosts = [*offer["hosts"], *filter(None, [address])]
    if offer["machine"] is not None and offer["machine"] == machine():
        hosts.append("127.0.0.1")
    errors = []
    for host in dict.fromkeys(hosts):
        try:
            connection = socket.create_connection((host, offer["port"]), timeout)
            connection.sendall(f"{offer['token']}\n".encode())
            return Line(connection, timeout)
        except OSError as error:
            errors.append(f"{host}: {error}")
    raise StrategyError(
        f"rank {rank} cannot reach rank 0 at port {offer['port']} ({'; '.join(errors)}). The machines of a"
        " job must be able to reach each other at any port"
    )


def own_hosts() -> list[str]:
    """Return this machine's possible addresses, the likeliest first."""
    name = socket.gethostname()
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    return [name, *(each for each in found if not each.startswith("127.") and each != "::1")]
