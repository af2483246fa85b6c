"""Sockets of this process that forked processes, such as a loader's workers, must not keep open.

A forked copy keeps a connection open after this process has died, which hides the death from the other end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Iterator

from drivetrain.distributed.interfaces import check_users

if sys.platform != "win32":
    import resource

_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""Options of tcp(7): the system breaks a connection when the other machine has not answered for 30 s."""

_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_torch_sockets: set[tuple[int, int]] = set()
_changing = threading.Lock()


def closed_in_forks(line: socket.socket) -> socket.socket:
    """Return the socket, and close its copy in forked processes."""
    with _changing:
        _open.add(line)
    return line


def keeping_alive(line: socket.socket) -> socket.socket:
    """Return the socket, which breaks when the other machine is gone; the system looks, not this program."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # as on Linux
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return line


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a connection broke because the other machine is gone."""
    return getattr(error, "errno", None) in _UNREACHABLE


class Wakeup:
    """Ends another thread's wait for a selector. `send` takes no lock, so a signal handler may call it."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._ends = socket.socketpair()
        for each in self._ends:
            closed_in_forks(each).setblocking(False)
        selector.register(self._ends[0], selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        self._ends[0].recv(1 << 10)

    def send(self) -> None:
        """End the wait of the other thread, or its next one."""
        with contextlib.suppress(OSError):  # full: it is sent already; closed: nobody waits
            self._ends[1].send(b"!")

    def close(self) -> None:
        for each in self._ends:
            each.close()


@contextlib.contextmanager
def closing_sockets_in_forks(keeps_alive: bool = False) -> Iterator[None]:
    """Run the block so that forked processes close the sockets it opens, such as those of torch.

    Args:
        keeps_alive: Whether these sockets break when the other machine is gone.
    """
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        with _changing:
            _torch_sockets.intersection_update(now)  # the others are closed
            _torch_sockets.update(now - before)
        for number, _ in now - before if keeps_alive else ():
            with socket.socket(fileno=os.dup(number)) as line:
                keeping_alive(line)
    if sys.platform == "linux" and now - before:
        check_users(inode for _, inode in now - before)


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Run the block with a port of this machine that no other program gets meanwhile.

    On Linux a bound socket that does not listen keeps the port. A socket that shares addresses, as torch's
    store does, can still bind and listen there. Other systems may refuse that or deliver no connections, so
    there the port is not held, and another program may take it first.
    """
    line = closed_in_forks(socket.socket())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("127.0.0.1", 0))
    port = int(line.getsockname()[1])
    if sys.platform != "linux":
        line.close()
    try:
        yield port
    finally:
        line.close()


def open_more_files() -> None:
    """Let this process open as many files as the hard limit allows: a rank connects to all others."""
    if sys.platform != "win32":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):  # macOS takes less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def out_of_files(world_size: int) -> str:
    """Return what to do where no file descriptor is left for the connection of another rank."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform != "win32" else "all"
    return (
        f"rank 0 has {limit} files and sockets open, which is its limit, and {world_size} ranks connect to"
        f" it. Raise the hard limit on its machine (ulimit -Hn, or LimitNOFILE of the service) to at least"
        f" {3 * world_size + 1024}"
    )


def _sockets() -> set[tuple[int, int]]:
    """Return the descriptors of all open sockets, each with its inode, which no other socket has."""
    found = set()
    directory = "/dev/fd"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        with contextlib.suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_copies() -> None:
    for each in list(_open):
        each.close()
    copies = _torch_sockets & _sockets()
    if not copies:
        return
    # torch's objects in this process may still close these descriptors, so the numbers must stay taken.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, _ in copies:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
