"""A program learns its rank, and prepares something once, whoever has started it; its port is its own."""

import os
import socket
import sys
import time
from pathlib import Path
from time import perf_counter

import pytest
import torch
from tests.support.ranks import on_two_ranks
from torch.distributed import TCPStore

import drivetrain
from drivetrain.distributed.launch.process_start import _IMPORTED, process_age, process_started
from drivetrain.distributed.sockets import reserved_port


def asked() -> tuple[int, int, int]:
    return drivetrain.rank(), drivetrain.local_rank(), drivetrain.world_size()


def test_rank_and_world_size_are_the_launchers_before_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked() == (0, 0, 1)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert asked() == (3, 1, 4)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process began")
def test_the_age_of_a_process_counts_what_was_before_the_import() -> None:
    started = process_started(os.getpid())
    assert started is not None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    assert process_age() >= age > perf_counter() - _IMPORTED


def made(path: Path) -> str:
    with drivetrain.one_at_a_time(path):
        if path.exists():
            return f"found {path.read_text()}"
        path.write_text("half")
        time.sleep(0.2)  # in which another one that is let in would find half of it
        path.write_text("whole")
        return "made"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_what_one_rank_makes_is_found_by_the_other() -> None:
    found = on_two_ranks(lambda: (asked(), made(Path("data/words.txt")), os.getpid()))
    assert [each[0] for each in found] == [(0, 0, 2), (1, 1, 2)]
    assert sorted(each[1] for each in found) == ["found whole", "made"]
    assert len({each[2] for each in found}) == 2
    assert Path("data/words.txt.lock").exists()


def test_one_that_failed_lets_the_next_in() -> None:
    with pytest.raises(ValueError, match="planted"), drivetrain.one_at_a_time("made"):
        raise ValueError("planted")
    with drivetrain.one_at_a_time("made"):
        pass


def test_a_reserved_port_is_nobody_elses_but_the_stores() -> None:
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        store.set("here", "rank 0")
        assert TCPStore("127.0.0.1", port, is_master=False).get("here") == b"rank 0"
        del store
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
