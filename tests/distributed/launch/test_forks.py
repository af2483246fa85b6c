"""Ranks of a program that cannot be run again: copies of it, which leave nothing behind."""

import json
import multiprocessing
import sys

import pytest
import torch
from tests.distributed.running import run_all
from tests.support.refusals import assert_refused
from torch import distributed

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.forks import fork_ranks

pytestmark = pytest.mark.skipif(
    not distributed.is_gloo_available() or sys.platform != "linux", reason="needs gloo and a safe fork"
)
EARLY = "RankFailure: rank 1 failed first, before the process group was formed: it was killed by SIGKILL"
CASES = {
    "raises": "RankFailure: rank 1 failed first: LookupError: no such column",
    "raises on 0": "LookupError: no such column",
    "killed": "RankFailure: rank 1 failed first: it was killed by SIGKILL",
    "stops": "RankFailure: rank 1 failed first, last heard of at step 7: it is stopped",
    "raises before it joins": "RankFailure: rank 1 failed first: ZeroDivisionError: division by zero",
    "killed before it joins": EARLY,
    "ends before it joins": "RankFailure: rank 1 ended with exit code 0 before the process group was formed",
    "interrupts": "KeyboardInterrupt: ",
}


@pytest.mark.real("ranks are killed and stopped")
def test_a_failed_fork_is_told_and_the_program_can_fork_ranks_again() -> None:
    """What the program has defined itself, as a notebook's cells do, is there in every rank."""
    found = run_all("forks.py", {case: {"case": case} for case in (*CASES, "reads")})
    outcomes = {}
    for case, ended in found.items():
        assert ended.code == 0, (case, ended.errors)
        once, text = ended.out.splitlines()
        assert once == "once", "what was printed before is printed by this process alone"
        outcomes[case], *again = json.loads(text)
        assert again == [[3.0, 1], [6.0, 1]], case
    assert outcomes.pop("reads") == 0, "a copy does not read what is typed"
    assert "in fail\n" in outcomes["raises"], "the traceback of the copy is the cause"
    assert {case: each[: len(CASES[case])] for case, each in outcomes.items()} == CASES


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> None:
        assert_refused(StrategyError, {words[0]: (lambda: fork_ranks(int, 2), *words)})

    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    refused("daemonic, as a worker of multiprocessing.Pool", "ProcessPoolExecutor")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refused("CUDA is in use", "start it as a script")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    refused("one of 2 already")
