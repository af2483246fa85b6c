"""What a process keeps to itself: connections, and the port that ranks are to meet at."""

import socket

import pytest
from torch.distributed import TCPStore

from drivetrain.distributed.sockets import release_port, reserve_port


def test_a_reserved_port_is_nobody_elses_but_the_stores() -> None:
    port = reserve_port()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("here", "rank 0")
        assert TCPStore("127.0.0.1", port, is_master=False).get("here") == b"rank 0"
        del store
    finally:
        release_port(port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
