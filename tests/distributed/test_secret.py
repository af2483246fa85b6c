"""Ranks prove that they have their job's secret, and a job names whom it waits for."""

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed import interfaces, secret, sockets
from drivetrain.distributed.failure.heartbeat import is_of_job
from drivetrain.distributed.launch import meeting
from drivetrain.distributed.launch.meeting import Meeting

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
NOBODY = 65534


def _refused(act: Callable[[], object]) -> str:
    with pytest.raises((RankFailure, StrategyError)) as caught:
        act()
    return str(caught.value)


def exchanges() -> Any:
    secret.authenticate(torch.distributed.get_rank(), 2)
    assert secret.verified("at", secret.signed("at", "{}")) == "{}"
    assert "signature" in _refused(lambda: secret.verified("other", secret.signed("at", "{}")))
    assert "signature" in _refused(lambda: secret.verified("at", "{}"))
    return distributed_c10d._pickler is pickle.Pickler, distributed_c10d._unpickler is pickle.Unpickler


@needs_gloo
def test_entries_of_the_store_are_signed_and_nothing_of_torch_is_replaced() -> None:
    assert on_two_ranks(exchanges) == [(True, True)] * 2


class Replayed:  # a store in which a stranger has put what the ranks wrote before
    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> Any:
        return self._store.get(key.replace("answer/2", "answer/1"))

    def multi_get(self, keys: list[str]) -> Any:
        return self._store.multi_get([key.replace("claim/2", "claim/1") for key in keys])


def has_another(fault: str) -> str:
    rank, found = torch.distributed.get_rank(), distributed_c10d._get_default_store
    if fault == "replayed":
        secret.authenticate(rank, 2)
        secret._store = None
        distributed_c10d._get_default_store = lambda: Replayed(found())
    else:
        is_short = (fault == "short on 0" and not rank) or (fault == "short" and rank)
        os.environ[secret.SECRET] = "short" if is_short else f"the secret of rank {rank}"
    try:
        return _refused(lambda: secret.authenticate(rank, 2))
    finally:
        distributed_c10d._get_default_store = found


def listens() -> set[str]:
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    rows = [line.split() for line in lines]
    own = {str(inode) for _, inode in sockets._sockets()}
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in own}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process listens on")
def test_the_store_of_one_machine_listens_on_its_loopback_alone() -> None:
    store = meeting.loopback_store()
    assert listens() == {"0100007F"}
    del store


@pytest.mark.parametrize("one_machine", [True, False])
def test_a_port_that_takes_connections_and_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, one_machine: bool
) -> None:
    monkeypatch.setattr(meeting, "_ANSWERS", timedelta(seconds=0.1))
    monkeypatch.delenv(meeting.STORE, raising=False)
    for name in (interfaces.GLOO, "NCCL_SOCKET_IFNAME", interfaces.LAZY):
        monkeypatch.setenv(name, "lo")
    monkeypatch.delenv(interfaces.LAZY)
    before = {*threading.enumerate()}
    with socket.create_server(("127.0.0.1", 0)) as line:
        port = line.getsockname()[1]
        one = Meeting(1, 2, "127.0.0.1", port, one_machine=one_machine)
        told = _refused(lambda: one.store(timedelta(minutes=1)))
    for each in {*threading.enumerate()} - before:
        each.join(300)  # the closed port ends it
    assert f"127.0.0.1:{port} is no store of torch's: it takes connections and does not answer" in told
    # On one machine all connections are opened at the start, and checked.
    assert os.environ.get(interfaces.LAZY) == (None if one_machine else "1")


@needs_gloo
@pytest.mark.parametrize("fault", ["another", "replayed", "short", "short on 0"])
def test_a_rank_with_another_secret_or_an_earlier_key_is_named_on_all(fault: str) -> None:
    for rank, told in enumerate(on_two_ranks(has_another, fault)):
        is_short = fault == ("short" if rank else "short on 0")
        other = f"rank {1 - rank} has another secret than rank {rank}"
        assert (f"{secret.SECRET} has 5 characters" if is_short else other) in told
        assert "Set DRIVETRAIN_SECRET to the same text" in told


@pytest.mark.skipif(os.name != "posix", reason="needs modes of files")
def test_the_secret_of_a_user_is_a_file_that_only_this_user_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(secret.SECRET, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path, made = tmp_path / "drivetrain" / "secret", secret.secret()
    assert secret.secret() == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["secret"]
    path.chmod(0o640)
    assert "others may read it: chmod 600" in _refused(secret.secret)
    path.unlink()
    os.mkfifo(path)
    assert "is not a file" in _refused(secret.secret)
    monkeypatch.setenv(secret.SECRET, "short")
    assert "DRIVETRAIN_SECRET has 5 characters" in _refused(secret.secret)
    monkeypatch.setenv(secret.SECRET, "\udcff" * 20)  # a byte that is no UTF-8
    assert "DRIVETRAIN_SECRET has bytes that are no text" in _refused(secret.secret)


needs_root = pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs Linux's root")


@needs_root
def test_a_connection_of_another_user_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        socket.create_connection(server.getsockname()).close()  # imports what the other user cannot read
        server.accept()[0].close()
        stranger = os.fork()
        if stranger == 0:
            try:
                os.setuid(NOBODY)
                with socket.create_connection(server.getsockname()):
                    signal.pause()
            finally:
                os._exit(0)
        connection, _ = server.accept()
        with connection, socket.create_connection(server.getsockname()) as own:
            inode = os.fstat(connection.fileno()).st_ino
            interfaces.check_users([os.fstat(own.fileno()).st_ino])
            assert f"user {NOBODY}" in _refused(lambda: interfaces.check_users([inode]))
            os.kill(stranger, signal.SIGKILL)
            os.waitpid(stranger, 0)


def test_a_missing_process_is_named_and_waited_for_until_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LATE", 0.01)
    monkeypatch.setattr(meeting, "REPEAT", 0.01)
    monkeypatch.setenv(meeting.LIMIT, "0.5")
    store, told = HashStore(), list[str]()
    first = Meeting(0, 3, "first", 7, asked_by="ITS_SIZE", each="machine", say=told.append)
    second = threading.Thread(target=Meeting(2, 3, "first", 7, say=told.append).wait, args=(store, int, 60))
    second.start()
    last = _refused(lambda: first.wait(store))
    assert "for machine 1 of 3 to connect to first:7. MASTER_ADDR must be an address of machine 0's" in last
    assert "unset ITS_SIZE. Start" in last
    assert "set DRIVETRAIN_JOIN_TIMEOUT" in last
    assert sum("machine 1 of 3" in each for each in told) > 1
    store.set("drivetrain/here/1", "")
    first.wait(store)
    second.join()


def test_a_name_without_an_address_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Meeting(1, 2, "no\x00host", 7)
    assert "MASTER_ADDR is 'no\\x00host', a name without an address" in _refused(lambda: here.store(None))  # type: ignore[arg-type]
    monkeypatch.setenv(meeting.LIMIT, "soon")
    assert "DRIVETRAIN_JOIN_TIMEOUT='soon'" in _refused(meeting.join_timeout)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells whose child a process is")
def test_only_relatives_of_this_process_count_as_ranks() -> None:
    assert is_of_job(os.getppid())
    assert not is_of_job(0)
    assert not is_of_job(1) or os.getppid() in (0, 1)
