"""Connections of this process that processes forked from it, such as a loader's workers, shall not hold.

A copy of a connection keeps it open when the process itself has died, and so hides that from the other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Iterator

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_torchs: set[tuple[int, int]] = set()
_changing = threading.Lock()
_reserved: dict[int, socket.socket] = {}


def kept_to_this_process(line: socket.socket) -> socket.socket:
    """The socket, which forked processes will not hold."""
    with _changing:
        _open.add(line)
    return line


@contextlib.contextmanager
def opened_here() -> Iterator[None]:
    """What is opened meanwhile, by torch say, forked processes will not hold either."""
    before = _sockets()
    try:
        yield
    finally:
        now = _sockets()
        with _changing:
            _torchs.intersection_update(now)  # the others are closed
            _torchs.update(now - before)


def reserve_port() -> int:
    """A port of this machine that nobody else is given until `release_port`.

    On Linux a socket that is bound there, and does not listen, keeps it: one that is told to share addresses,
    as that of torch's store is, can be bound and listen there all the same. Other systems may refuse that, or
    send it no connections; there another program may be quicker.
    """
    line = kept_to_this_process(socket.socket())
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("127.0.0.1", 0))
    port = int(line.getsockname()[1])
    if sys.platform == "linux":
        _reserved[port] = line
    else:
        line.close()
    return port


def release_port(port: int) -> None:
    """Give up a port that was reserved."""
    line = _reserved.pop(port, None)
    if line is not None:
        line.close()


def _sockets() -> set[tuple[int, int]]:
    """The descriptors of all sockets, each with a number that no other socket has."""
    found = set()
    directory = "/dev/fd"
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _close_copies() -> None:
    for each in list(_open):
        each.close()
    copies = _torchs & _sockets()
    if not copies:
        return
    # What torch still has of them in this process may close the same numbers, which must stay taken.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, _ in copies:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
