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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from drivetrain.distributed.silence import machine
from drivetrain.distributed.sockets import kept_to_this_process
from drivetrain.errors import RankFailure, StrategyError

TOKEN_BYTES = 32
"""Bytes of the token, in hexadecimal digits. It and a newline are the first that a rank sends."""

_LONGEST = 1 << 20
"""Bytes of a line; the hub closes a connection that sends a longer one."""

_TEXT = 10_000
"""Characters of a text in a message. Four such texts fit into a line, whatever characters they have."""

_FRAMES = 6
"""Frames of a traceback that are sent; the rank itself prints all of them."""

_OWN_WORDS = re.compile(r"\bgloo\b|\bnccl\b|process ?group(gloo|nccl)|c10d|\bTCPStore\b", re.IGNORECASE)
"""Words by which torch's communication libraries say that a message is theirs."""

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|timeout|connectFullMesh"
    r"|communicator|abort|remote process (exited|has terminated)|heartbeat monitor",
    re.IGNORECASE,
)
"""How these libraries say that another rank is gone."""

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
"""Where torch waits for other ranks. Its checkpoints are not among them: they wait for a disk."""

_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")
_OPERATOR = os.path.join(_TORCH, "_ops.py")


@dataclass(frozen=True)
class Timing:
    """The times of the failure channel, in seconds; tests scale them.

    Attributes:
        silence: Silence after which a rank that is seen to be stopped or gone counts as lost. One that cannot
            be seen, or does nothing, has twelve times as long.
        stranger: How long a connection may take to authenticate itself and to say which rank it is.
        aside: How long an error that is probably a consequence waits for its cause.
        deciding: How long a failing rank waits to hear whose failure was the first: more than `aside`.
        grace: How long a main thread has to end by itself once another rank has failed.
        unwinding: How long it has in addition when it has an error of its own: files are closed then.
        last: How long rank 0 lets the others end before it ends, so that its last lines are the last.
        freed: How long rank 0's main thread then has to end by itself, as it must where it is a notebook's.
        goodbye: How long rank 0, whose threads the channel lives in, waits at its end for the others.
        unseen: How much longer than `hang_timeout` a rank may spend in one compilation, save or load, which
            show no progress until they are done.
    """

    silence: float = 5.0
    stranger: float = 5.0
    aside: float = 2.0
    deciding: float = 3.0
    grace: float = 1.0
    unwinding: float = 4.0
    last: float = 2.0
    freed: float = 0.5
    goodbye: float = 60.0
    unseen: float = 3600.0

    def scaled(self, factor: float) -> Timing:
        """All times multiplied by a factor."""
        return Timing(**{each.name: getattr(self, each.name) * factor for each in fields(self)})


TIMING = Timing()
"""The times that a channel takes when it is given none."""


def at(where: str) -> str:
    """A place in a sentence: "at update 17"; "in training, after update 17" as it is."""
    return where if where.startswith(("at ", "in ", "after ", "before ")) else f"at {where}"


@dataclass(frozen=True)
class Cause:
    """Why a job fails.

    Attributes:
        kind: "error" for one that was raised, "consequence" for one that another rank's end has probably
            brought about, "lost" for a rank that died or stopped, "hang" where nobody makes progress.
        rank: Where.
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
        if self.kind == "hang":
            return self.what
        heard = "last heard of " if self.kind == "lost" else ""
        place = f", {heard}{at(self.where)}" if self.where else ""
        return f"rank {self.rank} failed first{place}: {self.what}"

    @classmethod
    def of_error(cls, rank: int, where: str, error: BaseException, besides: str = "") -> Cause:
        """The cause that an error on this rank may be; long texts lose their middle.

        Args:
            rank: This process.
            where: How far it is.
            error: What was raised here.
            besides: A sentence to add to it.
        """
        what = shortened("".join(traceback.format_exception_only(type(error), error)).strip())
        what = f"{what}. {besides}" if besides else what
        where_raised = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
        kind = "consequence" if is_consequence(error) else "error"
        return cls(kind, rank, where, what, shortened("".join(traceback.format_list(where_raised))))

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


def shortened(text: str) -> str:
    """A text of a length that can be sent: its middle is left out, and the number of characters is given."""
    if len(text) <= _TEXT:
        return text
    end = _TEXT // 5
    left_out = len(text) - _TEXT + 100  # room for the sentence that says so
    return f"{text[: _TEXT - end - 100]} [... {left_out:,} characters left out ...] {text[-end:]}"


def is_consequence(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone.

    That can only be an error of torch's communication: one of its own types, one with the name of gloo, NCCL
    or torch's process groups in it, or one that was raised inside of a collective.
    """
    distributed = torch.distributed
    of_torch = (distributed.DistError,) if distributed.is_available() else ()
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, of_torch):
            return True
        if isinstance(each, (RuntimeError, ConnectionError)) and _tells_of_loss(each):
            return True
        if any("happened on rank" in note for note in getattr(each, "__notes__", ())):
            return True
        each = each.__cause__
    return False


def _tells_of_loss(error: Exception) -> bool:
    text = str(error)
    is_torchs = _OWN_WORDS.search(text) is not None or _raised_in_collective(error)
    return is_torchs and _CONSEQUENCE.search(text) is not None


def _raised_in_collective(error: BaseException) -> bool:
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    return innermost is not None and is_collective(innermost)


def is_collective(frame: FrameType) -> bool:
    """Whether a frame is one in which torch waits for other ranks, a backward with its averaging included."""
    if frame.f_code.co_filename == _OPERATOR and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file.startswith(_COLLECTIVE) or (
        file == _BACKWARD and frame.f_code.co_name == "_engine_run_backward"
    )


def is_voluntary(error: BaseException) -> bool:
    """Whether an end is one that the program wants, such as `sys.exit()`; it is no failure in itself."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


class Line:
    """Messages to and from one other process. Any thread may send; one receives.

    Args:
        connection: A connected socket.
        timeout: Seconds that sending may take.

    Attributes:
        broken: Why nothing can be sent any more; None while it can.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket = kept_to_this_process(connection)
        self.socket.settimeout(timeout)
        # A goodbye that waits in the system for more to send would be lost when the line is closed after it.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.broken: OSError | None = None
        self._rest = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send a message, with long texts shortened; False when nobody can take it any more.

        A message that could be sent in part only is the last one: what followed would not be understood.
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


def _short(value: Any) -> Any:
    """A message in which no text is too long to be sent."""
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return value


def connect(rank: int, offer: dict[str, Any], address: str | None, timeout: float) -> Line:
    """An authenticated line to rank 0.

    Args:
        rank: This process.
        offer: What rank 0 has put into the store: its "machine", "port", "token" and "hosts".
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
    """Where this machine may be reached, the likeliest first."""
    name = socket.gethostname()
    try:
        found = [str(each[4][0]) for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    return [name, *(each for each in found if not each.startswith("127.") and each != "::1")]
