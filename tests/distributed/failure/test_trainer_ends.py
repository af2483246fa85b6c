"""A rank of a training fails or is interrupted while the others wait for it: all end, and say why."""

import re
import signal
import sys
from typing import Any

import pytest
import torch
from tests.distributed.running import run_all, stacks

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs signals"),
    pytest.mark.real("ranks are killed and interrupted"),
]
BOOM = "raise ValueError('boom')"
ONE = "RankFailure: rank 1 failed first, "
# As gloo does where ranks make different collectives: no Python code runs any more.
ABORT = "rank 1 failed first.*by SIGABRT.*; rank 0 was in training, after step 3, in the b"
START = ONE + ".*in validation, .*, in on_evaluation_start of Acts: ValueError: boom$"
END = "drivetrain: rank 0 failed first, in validation, .*in on_evaluation_end of Acts: ValueError: boom"
EPOCH = "rank 0 .*, after step 10, in on_epoch_end of Acts: Sys"
KILLED = "RankFailure: rank 0 failed first.*: it was killed"
ENDS: dict[str, tuple[dict[str, Any], int, str]] = {
    "save": ({"act": "kill()"}, 1, ONE + "last heard of .*: it was killed by"),
    "evaluation start": ({"strategy": "fsdp", "act": BOOM}, 1, START),
    "evaluation end": ({"act": BOOM, "who": [0]}, 1, END),
    "epoch end": ({"act": "sys.exit(3)", "who": [0]}, 3, EPOCH),
    "forward": ({"act": "kill()", "who": [0]}, -signal.SIGKILL, KILLED),
    "step end": ({"act": "os.abort()"}, 1, ABORT),
}


def test_the_first_cause_is_the_last_line_with_its_location() -> None:
    found = run_all("training.py", {where: {"where": where, **each[0]} for where, each in ENDS.items()})
    for where, ended in found.items():
        _, code, last = ENDS[where]
        assert (where, ended.code, ended.out) == (where, code, ""), ended.errors
        assert re.search(last, ended.errors[-1]), (where, ended.errors)
    assert "ValueError: boom" in stacks(found["evaluation start"])["rank1.txt"], "with its traceback"
    aborted = found["step end"].errors
    assert any("training.py" in each and "in on_step_end" in each for each in aborted), "where it was"


def test_a_steady_fit_has_three_threads_on_rank_0_and_as_many_on_the_others() -> None:
    names = "sorted(each.name.removeprefix('drivetrain-') for each in threading.enumerate())"
    act = f"import threading; sys.stdout.write(' '.join({names}[1:]) + '\\n')"
    ended = run_all("training.py", {"steady": {"where": "step end", "act": act, "who": [0, 1]}})["steady"]
    assert (ended.code, ended.errors) == (0, [])
    found = sorted(each for each in ended.out.splitlines() if each != "ended")
    assert found == ["failure lock signals", "failure parent signals"]


def test_a_second_interrupt_ends_all_ranks_at_once() -> None:
    twice = {"act": "wait()", "interrupt": signal.SIGINT, "again": True}
    cases = {
        "of all ranks": {"where": "save", "strategy": "fsdp", "whole_group": True, **twice},
        "while rank 0 waits": {"where": "epoch end", **twice},
        "after the body of rank 0": {"where": "body", **twice},
    }
    found = run_all("training.py", cases)
    for name, ended in found.items():
        assert (name, ended.code, ended.out) == (name, -signal.SIGINT, ""), ended.errors
        assert any(each.endswith("KeyboardInterrupt") for each in ended.errors)
