"""A loop of one's own on several processes: when one fails all end, and the last line says why."""

import re

import pytest
from tests.distributed.running import run, run_all
from torch import distributed

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.real("a rank is killed"),
]
BOOM = "raise ValueError('boom')"
WITH = "with engine:\n    loop()"
AFTER = " failed first, after step 4: "
ENDS = {
    "raises": ({"act": BOOM, "who": [1]}, f"rank 1{AFTER}"),
    "raises on 0": ({"act": BOOM, "who": [0]}, f"rank 0{AFTER}"),
    "raises in with": ({"act": BOOM, "who": [1], "around": WITH}, f"rank 1{AFTER}"),
    "killed": ({"act": "kill()", "who": [1]}, "rank 1 failed first, last heard of .*: it was killed by SIG"),
    "ends": ({"act": "sys.exit()", "who": [1]}, "rank 1 failed first, .*after step 4: it had ended when"),
}


def test_a_loop_that_fails_on_one_rank_ends_on_all_with_the_cause() -> None:
    for name, ended in run_all("own_loop.py", {name: each[0] for name, each in ENDS.items()}).items():
        assert (name, ended.code) == (name, 1)
        assert re.search(ENDS[name][1], ended.errors[-1]), (name, ended.errors)


def test_a_loop_that_ends_well_is_silent_though_one_rank_is_slow() -> None:
    ways = {"plain": "loop()", "with": WITH, "several": "loop(); loop(); engine.teardown()"}
    cases = {name: {"act": "pause()", "around": around} for name, around in ways.items()}
    for name, ended in run_all("own_loop.py", cases).items():
        out = sorted(ended.out.splitlines())
        assert (name, ended.code, out, ended.errors) == (name, 0, ["rank 0 ended", "rank 1 ended"], [])


def test_a_rank_of_multiprocessing_that_ends_before_the_others_is_not_lost() -> None:
    ended = run("multiprocess.py")
    assert (ended.code, ended.out, ended.errors) == (0, "0 0", [])
