"""The network interface of a job: which addresses it listens on, and who is at the other end."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from drivetrain.core.errors import StrategyError

GLOO = "GLOO_SOCKET_IFNAME"
"""The variable that tells gloo which interface to listen on."""

LAZY = "TORCH_GLOO_LAZY_INIT"
"""The variable that lets gloo connect two ranks when they first exchange something, not each to all."""

_ADDRESS_OF_INTERFACE = 0x8915
"""The call SIOCGIFADDR; see netdevice(7)."""

_ESTABLISHED = "01"

_BACKLOG = 1024
"""Connections that may wait to be accepted: all ranks connect at the same time."""

_AGAIN = 8.0
"""Seconds for which a name is asked for again if no name server has answered."""


def check_resolves(host: str, variable: str) -> None:
    """Check that a host has an address."""
    until = time.monotonic() + _AGAIN
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            if getattr(error, "errno", None) != socket.EAI_AGAIN or time.monotonic() > until:
                raise StrategyError(
                    f"{variable} is {host!r}, a name without an address on {socket.gethostname()} ({error})."
                    f" Set {variable} to a name or an address of rank 0's machine that all machines can reach"
                ) from error
        time.sleep(1.0)


def own_address(host: str) -> str | None:
    """Return this machine's own address on the way to another host; None if that is unknown.

    It is unknown too for a name that leads to this machine's loopback interface, as its own name does on some
    systems: that says nothing about the other machines.
    """
    with suppress(OSError, UnicodeError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as line:
            line.connect(address)  # sends nothing
            found = str(line.getsockname()[0])
        is_loopback = found.startswith("127.") or found == "::1"
        return None if is_loopback and not _is_literal(host) else found
    return None


def _is_literal(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address of this machine.

    Args:
        host: The address; empty for all of this machine's, of both families.
        port: The port; 0 takes a free one.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an address of this machine; None if unknown."""
    if sys.platform != "linux":
        return None
    import fcntl

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    packed = socket.inet_pton(family, address.partition("%")[0])
    if ":" in address:
        with suppress(OSError):
            for row in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
                number, *_, name = row.split()
                if bytes.fromhex(number) == packed:
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found: bytes = fcntl.ioctl(line.fileno(), _ADDRESS_OF_INTERFACE, request)
                if found[20:24] == packed:
                    return name
    return None


def loopback_variables() -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on the loopback interface, where the user sets none."""
    if sys.platform == "win32":
        return {}
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    wanted = {} if name is None else {GLOO: name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {each: value for each, value in wanted.items() if each not in os.environ}


def check_users(inodes: Iterable[int]) -> None:
    """Check that no other user's process is at the other end of connections that stay on this machine.

    The loopback interface is open to all users of a machine, and gloo asks for no password. Only Linux tells.
    """
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text("ascii").splitlines()[1:]:
                _, local, remote, state, _, _, _, user, _, inode, *_ = line.split()
                if state == _ESTABLISHED:
                    rows[local, remote] = (int(user), int(inode))
    own = set(inodes)
    for (here, there), (_, mine) in rows.items():
        found = rows.get((there, here), (0, 0))[0] if mine in own else 0
        if found not in (0, os.getuid()):
            raise StrategyError(
                f"a process of user {found}, not yours, has connected to this job in place of a rank. The job"
                " ends, because that process could choose its numbers. Run the job on a machine, or in a"
                " container, that this user cannot use"
            )
