"""A run that not all ranks begin says so, instead of waiting in silence."""

import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import run_all
from tests.support.messages import warned
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import api

from drivetrain.core.errors import StrategyError
from drivetrain.distributed import group
from drivetrain.distributed.launch import meeting, rendezvous, torchrun
from drivetrain.distributed.launch.meeting import Meeting

ADVICE = "and this run needs all ranks. Call fit, validate, test and predict on all ranks, not under `if rank"


@pytest.mark.real("ranks end early")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_rank_that_has_ended_is_named_with_what_to_do() -> None:
    cases = {
        "if rank == 0: begins()": ("rank 1 (has ended|ended with exit code 0)", "RankFailure"),
        "if rank == 1: begins()": ("rank 0 has ended", "rank 1 failed: it ended"),
        "if rank == 0: begins()\nend_at_once()": ("rank 1 ended with exit code 0", "RankFailure"),
    }
    programs = {after: {"then": f"begins()\n{after}"} for after in cases}
    for after, ended in run_all("ranks.py", programs).items():
        told, last = cases[after]
        assert ended.code == 1, after
        assert any(ADVICE in each and re.search(told, each) for each in ended.errors), ended.errors
        assert last in ended.errors[-1]


def test_the_second_process_with_a_number_is_refused_and_one_that_has_ended_is_replaced() -> None:
    for each, option in (("rank", "RANK"), ("machine", "--node-rank")):
        store = HashStore()
        store.set("drivetrain/here/1", f"{socket.gethostname()} process 4194305")  # above the largest number
        second = Meeting(1, 3, "127.0.0.1", 1, each=each)
        second._claim(store)
        store.set("drivetrain/here/1", "other process 4194305")
        with pytest.raises(StrategyError, match=rf"{each} 1 of 3 is there twice: other process 4.*{option}"):
            second._claim(store)
        assert store.get("drivetrain/here/1") == b"other process 4194305", "the first one goes on"


def test_a_group_of_gpus_is_left_to_the_interpreter_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """To end it in order would wait for collectives that other ranks never join."""
    ended: list[str] = []
    monkeypatch.setattr(group.distributed, "destroy_process_group", lambda: ended.append("in order"))
    monkeypatch.setattr(group.distributed, "is_initialized", lambda: True)
    for bound, failed, expected in (("cuda", True, 0), ("cuda", False, 1), (None, True, 1)):
        monkeypatch.setattr(group, "_bound", bound and torch.device(bound, 0))
        monkeypatch.setattr(group, "_failed", False)
        monkeypatch.setattr(group, "_formed", True)
        if failed:
            group.note_failure()
        ended.clear()
        group.disband()
        assert len(ended) == expected, (bound, failed)


def test_a_rank_that_is_late_is_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store, has_warned = HashStore(), threading.Event()

    def warn(text: Any) -> None:
        logger.warning(text)
        has_warned.set()

    logger = rendezvous._LOG
    monkeypatch.setattr(rendezvous, "_LOG", type("Log", (), {"warning": staticmethod(warn)}))
    monkeypatch.setattr(rendezvous, "default_store", lambda: store)
    monkeypatch.setattr(meeting, "LATE", 0.1)
    early = threading.Thread(target=rendezvous.gather, args=(0, 2))
    with warned(r"waiting for 0 s for rank 1 to begin the same run") as told:
        early.start()
        assert has_warned.wait(60)
        assert early.is_alive()
        rendezvous.gather(1, 2)
        early.join()
    assert len(told) == 1


def test_a_meeting_that_ends_while_a_machine_joins_is_one_to_try_again(tmp_path: Path) -> None:
    for kind, again in ((api.RendezvousConnectionError, True), (api.RendezvousTimeoutError, False)):
        assert torchrun._failure(kind(), tmp_path, "first-host:29400")["closed"] is again
