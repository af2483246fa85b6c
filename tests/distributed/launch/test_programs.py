"""A program becomes several ranks by itself, however it was started, and they end together."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.running import LIMIT, PROGRAMS, run_all
from tests.support.forked import JOB
from tests.support.refusals import assert_refused

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.environment import ProcessEnvironment
from drivetrain.distributed.launch.programs import ensure_ranks, rerun_obstacle

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
real = pytest.mark.real("ranks are started and killed")
SCRIPT = pytest.param("script", marks=pytest.mark.heavy("the way that every user starts ranks"))
WAYS = [SCRIPT, *(pytest.param(each, marks=pytest.mark.landing) for each in ("module", "command"))]


@needs_gloo
@real
@pytest.mark.parametrize("way", WAYS)
def test_a_program_becomes_all_ranks_however_it_was_started(way: str) -> None:
    """Each in the program's first directory and with its share of threads; rank 0 has the standard input."""
    shutil.copy(PROGRAMS / "summed.py", "program.py")
    text = Path("program.py").read_text(encoding="utf-8")
    words = {"script": ["program.py"], "module": ["-m", "program"], "command": ["-c", text]}[way]
    environment = {name: value for name, value in os.environ.items() if name not in (*JOB, "OMP_NUM_THREADS")}
    options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    words = [sys.executable, *words, "--rate", "0.1"]
    done = subprocess.run(words, input="typed", env=environment, **options)
    assert (done.returncode, done.stderr) == (0, ""), "the end of all ranks is silent"
    share = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else None
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [[*each[:3], *each[4:]] for each in lines] == [
        ["drivetrain", "0", "3", "--rate", "0.1", "typed"],
        ["drivetrain", "1", "3", "--rate", "0.1"],
    ]
    assert share is None or [int(each[3]) for each in lines] == [share, share]


EARLY = "RankFailure: rank 1 failed first, before the process group .*: it "
ENDS = {
    # Rank 0 waits for a rank that will not come, as it does where the process group is formed.
    "if rank == 1: fails()\ntime.sleep(600)": (1, "rank 1 failed first: it ended with"),
    "if rank == 1: sys.exit(3)\ntime.sleep(600)": (3, "rank 1 failed first: it ended with exit code 3"),
    # Rank 0 has nothing left to do.
    "if rank == 1: sys.exit(3)": (3, "rank 1 failed: it ended with exit code 3"),
    "if rank == 1: kill()": (1, "rank 1 failed: it was killed by SIGKILL"),
    # Its own error is the last word; the other rank is ended.
    "if rank == 0: raise ValueError('mine')\ntime.sleep(600)": (1, "ValueError: mine"),
    "joins(before=fails)": (1, EARLY + "ended with exit code 1$"),
    "joins(before=kill)": (1, EARLY + "was killed by SIGKILL$"),
    "joins(before=sys.exit)": (1, "RankFailure: rank 1 ended with exit code 0 before the process group was"),
    # Rank 0 itself learns only that a connection was closed.
    "joins(after=fails)": (1, "^drivetrain: rank 1 failed first: it ended with exit code 1$"),
}


@needs_gloo
@real
def test_a_rank_that_fails_ends_the_program_and_is_named() -> None:
    for then, ended in run_all("ranks.py", {then: {"then": then} for then in ENDS}).items():
        code, last = ENDS[then]
        assert (then, ended.code) == (then, code), ended.errors
        assert re.search(last, ended.errors[-1]), (then, ended.errors)
        shown = [each for each in ended.errors if each.endswith("ValueError: no data")]
        assert len(shown) == ("fails" in then), then


@real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's end of a parent's children")
def test_ranks_end_when_rank_0_is_killed() -> None:
    waits = "if rank == 0: Path('store').write_text(os.environ['DRIVETRAIN_STORE']); until('here'); kill()"
    waits += "\nPath('here').touch(); time.sleep(600)"
    (ended,) = run_all("ranks.py", {"waits": {"then": waits}}).values()
    assert ended.code == -signal.SIGKILL
    assert not Path("waits", Path("waits", "store").read_text(encoding="utf-8")).parent.exists()


def test_a_program_that_cannot_be_run_again_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    assert "tests" in str(rerun_obstacle())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "ps1", ">>> ", raising=False)
        assert rerun_obstacle() == "it is interactive"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(sys.modules["drivetrain.distributed.launch.programs"], "_ran_alone", False)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)  # none under xdist
    monkeypatch.setattr(sys, "argv", ["-"])
    told = ("devices=2 needs 2 processes, but this program cannot be run again", "standard input")
    forks = (lambda: ensure_ranks(2)), *told, "then fork the process; Train"
    launcher = (lambda: ensure_ranks(4, 2)), "needs a launcher", "drivetrain launch --nodes 2", "srun"
    assert_refused(StrategyError, {"standard input": forks, "machines": launcher})
    assert ensure_ranks(1).world_size == 1


def test_a_launchers_job_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert ensure_ranks(2, 2) == ProcessEnvironment("torchrun", 1, 4, 1, 2, "a")
    message = r"this program was started as 4 processes, but devices=2 and num_nodes=1 ask for 2\. Give"
    with pytest.raises(StrategyError, match=message):
        ensure_ranks(2)
