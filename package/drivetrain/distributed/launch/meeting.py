"""Where the processes of a job first meet: a store in a private file, or one behind a port.

On one machine the launcher hands out a file in a folder that only its user can enter, and no port is opened.
Otherwise it is torch's store at rank 0's address, which anybody who reaches the port can read and change.
So nothing secret lies there, and `secret.authenticate` follows.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

from drivetrain.core.errors import StrategyError, shown
from drivetrain.core.messages import logger
from drivetrain.distributed.failure.heartbeat import is_gone
from drivetrain.distributed.interfaces import (
    GLOO,
    LAZY,
    check_resolves,
    interface_of,
    listen,
    loopback_variables,
    own_address,
)
from drivetrain.distributed.secret import SECRET, new_secret
from drivetrain.distributed.sockets import closing_sockets_in_forks
from drivetrain.distributed.threads import within

_LOG = logger(__name__)

STORE = "DRIVETRAIN_STORE"
"""An environment variable: the file where the processes of one machine meet."""

HOSTED = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: "True" if the store at MASTER_ADDR is there already, and rank 0 has none to open."""

LIMIT = "DRIVETRAIN_JOIN_TIMEOUT"
"""An environment variable: seconds that a job waits for a process or a machine that does not come."""

DEFAULT_LIMIT = 1800.0

_HERE = "drivetrain/here/{}"
"""A key in the store for each process that has reached it."""

_ALL = "drivetrain/all here"

LATE, REPEAT = 10.0, 60.0
"""Seconds after which a missing process is named, and after which it is named again."""

_PAUSES = (0.01, 0.2)
"""Seconds between two checks of the store: at first, and at most."""

_SHOWN = 8
"""Missing processes that a message names."""

_LIMIT = timedelta(minutes=30)
"""The limit of a store for groups that are not formed here, as torch's own."""

_ANSWERS = timedelta(seconds=30)
"""The time in which a store that takes connections answers too."""

_TRY = 3.0
"""Seconds that one attempt to connect may take."""


def make_store_folder(port: int) -> dict[str, str]:
    """Make a folder for the store of a job on this machine; return the variables that lead its ranks there.

    Args:
        port: The job's MASTER_PORT. A process of another job that has inherited the variables has another.
    """
    try:
        folder = tempfile.mkdtemp(prefix="drivetrain-")  # which only this user may enter
    except OSError as error:
        raise StrategyError(
            f"the meeting folder of the ranks could not be made: {error}. Set TMPDIR to another folder of"
            " this machine"
        ) from error
    return {STORE: os.path.join(folder, f"store-{port}"), SECRET: new_secret()}


def remove_store_folder(variables: dict[str, str]) -> None:
    shutil.rmtree(os.path.dirname(variables[STORE]), ignore_errors=True)


def loopback_store() -> TCPStore:
    """Return a store that only this machine reaches, for programs that form torch's process group themselves.

    Theirs would listen on all interfaces. They become clients of this one where `HOSTED` is set.
    """
    with closing_sockets_in_forks():
        return _store_on(listen("127.0.0.1"), _LIMIT)


def _store_on(line: socket.socket, timeout: timedelta) -> TCPStore:
    """Return a store that takes connections from a listening socket."""
    host, port = line.getsockname()[:2]
    return TCPStore(
        "127.0.0.1" if host == "::" else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=line.detach(),
    )


@dataclass(frozen=True)
class Meeting:
    """The address where the processes of a job meet, as one of them sees it.

    Attributes:
        variable: The option or variable that has the address, for messages.
        asked_by: The variable that has the size; "" for an option.
        each: What a process is called, such as "rank".
        is_hosted: Whether another process, such as torch's agent, has the store.
        says: Whether this process says whom it waits for.
    """

    number: int
    size: int
    address: str
    port: int
    variable: str = "MASTER_ADDR"
    asked_by: str = ""
    each: str = "rank"
    one_machine: bool = False
    is_hosted: bool = False
    says: bool = True
    say: Callable[[str], None] = _LOG.warning

    def store(self, timeout: timedelta) -> Store:
        """Return the store, after waiting for the process that has it."""
        if self._is_private():
            return FileStore(os.environ[STORE], self.size)
        host = "127.0.0.1" if self.one_machine and not self.is_hosted else self.address
        check_resolves(host, self.variable)
        self._choose_interface()
        if self.number == 0 and not self.is_hosted:
            return self._host(timeout)
        return self._connected(self._reach(host), timeout)

    def _connected(self, host: str, timeout: timedelta) -> Store:
        """Return the store of another process at an address where somebody takes connections."""
        made: list[TCPStore | RuntimeError] = []

        def connect() -> None:
            try:
                with closing_sockets_in_forks(keeps_alive=True):
                    made.append(
                        TCPStore(host, self.port, is_master=False, wait_for_workers=False, timeout=_ANSWERS)
                    )
            except RuntimeError as error:
                made.append(error)

        # torch has no limit for the first answer of a port that takes connections, and pauses between tries.
        within(2 * _ANSWERS.total_seconds(), connect, "drivetrain-connect")
        found = made[0] if made else RuntimeError("it takes connections and does not answer")
        if isinstance(found, RuntimeError):
            reason = str(found).partition("\n")[0]
            raise StrategyError(
                f"{self._where()} is no store of torch's: {reason}. Another program may have the port. Give a"
                f" free port of {self.each} 0's machine, the same for all"
            ) from found
        found.set_timeout(timeout)
        return found

    def wait(
        self, store: Store, check: Callable[[], None] = lambda: None, limit: float | None = None
    ) -> None:
        """Wait until all processes have reached the store; say after ten seconds which one is missing."""
        if not self.is_hosted:
            self._claim(store)
        store.set(_HERE.format(self.number), self._own())
        keys = [_HERE.format(each) for each in range(self.size)]
        patience = Patience(self._say, limit)
        while not store.check([_ALL]):
            if self.number == 0 and store.check(keys):
                store.set(_ALL, "")
                return
            check()
            whom = f"all {self.size} {self.each}s"
            if self.number == 0 and patience.is_due():
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                whom = f"{self.each} {', '.join(map(str, missing[:_SHOWN]))}{more} of {self.size}"
            patience.wait(f"{whom} to connect to {self._where()}", self._advice())

    def _claim(self, store: Store) -> None:
        """Check that no other process has this one's number.

        Raises:
            StrategyError: One has, and goes on.
        """
        found = store.compare_set(_HERE.format(self.number), "", self._own()).decode()
        host, _, pid = found.rpartition(" process ")
        if found == self._own() or (host == socket.gethostname() and is_gone(int(pid))):
            return
        option = "--node-rank" if self.each == "machine" else "RANK"
        raise StrategyError(
            f"{self.each} {self.number} of {self.size} is there twice: {shown(found)} and {self._own()}."
            f" Give each {self.each} a number of its own ({option})"
        )

    def _own(self) -> str:
        return f"{socket.gethostname()} process {os.getpid()}"

    def _say(self, text: str) -> None:
        if self.says:
            self.say(text)

    def _advice(self) -> str:
        if self._is_private():
            return ""
        # A program that a rank of an MPI job has started has inherited its variables.
        alone = f" If this process is to train alone, unset {self.asked_by}." if self.asked_by else ""
        reached = f"must be an address of {self.each} 0's machine that all others can reach"
        return f" {self.variable} {reached}.{alone}"

    def _is_private(self) -> bool:
        """Return whether the processes meet in a file."""
        return os.environ.get(STORE, "").endswith(f"-{self.port}")

    def _where(self) -> str:
        return "this machine" if self._is_private() else f"{self.address}:{self.port}"

    def _choose_interface(self) -> None:
        """Let gloo listen on the interface of the job alone; the user's choice stays."""
        if self.one_machine:
            os.environ.update(loopback_variables())
            return
        os.environ.setdefault(LAZY, "1")
        own = own_address(self.address)
        name = None if own is None else interface_of(own)
        if name is not None:
            os.environ.setdefault(GLOO, name)

    def _host(self, timeout: timedelta) -> Store:
        # Where the address of this machine is unknown, listen on all.
        host = "127.0.0.1" if self.one_machine else own_address(self.address) or ""
        try:
            line = listen(host, self.port)
        except OSError as error:
            raise StrategyError(
                f"the process group could not be formed: {self.each} 0 cannot listen on {self._where()}"
                f" ({error}). Set MASTER_PORT to a free port, the same for all"
            ) from error
        return _store_on(line, timeout)

    def _reach(self, host: str) -> str:
        """Return the first of a host's addresses at which somebody answers."""
        patience = Patience(self._say)
        while True:
            try:
                with socket.create_connection((host, self.port), _TRY) as line:
                    return str(line.getpeername()[0])
            except OSError as error:
                whom = f"{self.each} 0 of {self.size} at {self._where()} ({error})"
                patience.wait(whom, self._advice())


class Patience:
    """Pauses between two checks, with a message now and then, up to a limit."""

    def __init__(self, say: Callable[[str], None], limit: float | None = None) -> None:
        self._say = say
        self._limit = join_timeout() if limit is None else limit
        self._begun = time.monotonic()
        self._next, self._pause = LATE, _PAUSES[0]

    def waited(self) -> float:
        return time.monotonic() - self._begun

    def is_due(self) -> bool:
        """Return whether the next `wait` says something or raises."""
        return self.waited() >= min(self._next, self._limit)

    def wait(self, whom: str, advice: str = "") -> None:
        waited = self.waited()
        if waited >= self._limit:
            raise StrategyError(
                f"waited {waited:.0f} s for {whom}.{advice} Start all processes of the job within"
                f" {self._limit:g} s, or set {LIMIT} to more seconds"
            )
        if waited >= self._next:
            self._next = waited + REPEAT
            self._say(f"waiting for {waited:.0f} s for {whom}.{advice}")
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _PAUSES[1])


def join_timeout() -> float:
    """Return the seconds that a job waits for a process that does not come."""
    given = os.environ.get(LIMIT, str(DEFAULT_LIMIT))
    with suppress(ValueError):
        if 0 < float(given) < float("inf"):
            return float(given)
    raise StrategyError(f"{LIMIT}={given!r} in the environment is not a number of seconds above 0")
