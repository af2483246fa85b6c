"""A program becomes several ranks by itself, however it was started, and they end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.children import Child, ending, threads_per_rank, wait_for
from drivetrain.distributed.launch.environment import ProcessEnvironment
from drivetrain.distributed.launch.programs import ensure_ranks, rerun_obstacle

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)

SUM = """
import os, sys
import torch
from drivetrain.distributed.launch.programs import ensure_ranks

environment = ensure_ranks(2)
assert ensure_ranks(2) == environment
torch.distributed.init_process_group("gloo")
total = torch.tensor([environment.rank + 1])
torch.distributed.all_reduce(total)
words = [environment.launcher, environment.rank, total.item(), torch.get_num_threads(), *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")
torch.distributed.destroy_process_group()
"""


def python(
    *words: str | Path, typed: str = "", expected: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, alone whatever the tests run in; it and what it leaves behind end.

    A process that it left behind would hold its output open, and so be found.
    """
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **variables},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(typed, timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the program, or a rank of it, has not ended:\n{out}\n{err}")
    assert process.returncode == expected, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@needs_gloo
@pytest.mark.parametrize("way", ["script", "module", "command"])
def test_a_program_becomes_all_ranks_however_it_was_started(tmp_path: Path, way: str) -> None:
    (tmp_path / "program.py").write_text(SUM, encoding="utf-8")
    words = {"script": ["program.py"], "module": ["-m", "program"], "command": ["-c", SUM]}[way]
    done = python(*words, "--rate", "0.1")
    share = max(1, len(os.sched_getaffinity(0)) // 2) if hasattr(os, "sched_getaffinity") else None
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert [[each[1], each[2], *each[4:]] for each in lines] == [[r, "3", "--rate", "0.1"] for r in "01"]
    assert share is None or [int(each[3]) for each in lines] == [share, share]
    assert {each[0] for each in lines} == {"drivetrain"}
    assert done.stderr == "", "the end of all ranks is silent"


@needs_gloo
def test_the_users_number_of_threads_is_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SUM, encoding="utf-8")
    done = python("program.py", OMP_NUM_THREADS="2")
    assert sorted(done.stdout.splitlines()) == ["drivetrain 0 3 2", "drivetrain 1 3 2"]


def test_a_program_that_has_changed_its_directory_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    program = "import os, sys\nfrom drivetrain.distributed.launch.programs import ensure_ranks\n"
    program += "os.chdir('elsewhere')\nsys.stdout.write(f'{ensure_ranks(2).rank}\\n')\n"
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    assert sorted(python("program.py").stdout.split()) == ["0", "1"]


def test_only_rank_0_reads_what_is_typed(tmp_path: Path) -> None:
    program = "import sys\nfrom drivetrain.distributed.launch.programs import ensure_ranks\n"
    program += "rank = ensure_ranks(2).rank\n"
    program += "sys.stdout.write(f'{rank} {sys.stdin.read()}.')\n"
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    assert sorted(python("program.py", typed="typed").stdout.split(".")) == ["", "0 typed", "1 "]


FAILING = """
import os, signal, sys, time
from drivetrain.distributed.launch.programs import ensure_ranks

rank = ensure_ranks(2).rank
"""


@pytest.mark.parametrize(
    ("then", "code", "last"),
    [
        # Rank 0 waits for a rank that will not come, as it does where the process group is formed.
        (
            "if rank == 1: raise ValueError('no data')\ntime.sleep(200)",
            1,
            "rank 1 failed first: it ended with",
        ),
        ("if rank == 1: sys.exit(3)\ntime.sleep(200)", 3, "rank 1 failed first: it ended with exit code 3"),
        # Rank 0 has nothing left to do.
        ("if rank == 1: sys.exit(3)", 3, "rank 1 failed: it ended with exit code 3"),
        ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 1, "rank 1 failed: it was killed by SIGKILL"),
        # Its own error is the last word; the other rank is ended.
        ("if rank == 0: raise ValueError('mine')\ntime.sleep(200)", 1, "ValueError: mine"),
    ],
)
def test_a_rank_that_fails_ends_the_program(tmp_path: Path, then: str, code: int, last: str) -> None:
    (tmp_path / "program.py").write_text(FAILING + then, encoding="utf-8")
    started = time.monotonic()
    done = python("program.py", expected=code)
    assert last in done.stderr.splitlines()[-1]
    assert time.monotonic() - started < 60, "not after the 200 s that the other rank would take"


JOINING = """
from drivetrain.distributed.group import join
import torch
if rank == 1:
    BEFORE
join(2, "cpu")
if rank == 1:
    AFTER
torch.distributed.all_reduce(torch.ones(1))
"""


@needs_gloo
@pytest.mark.parametrize(
    ("before", "after", "last"),
    [
        (
            "raise ValueError('no data')",
            "pass",
            r"RankFailure: rank 1 failed first, before the process group .*: it ended with exit code 1$",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "pass",
            r"RankFailure: rank 1 failed first, before the process group .*: it was killed by SIGKILL$",
        ),
        ("sys.exit()", "pass", r"RankFailure: rank 1 ended with exit code 0 before the process group was"),
        # Rank 0 itself learns only that a connection was closed.
        (
            "pass",
            "raise ValueError('no data')",
            "^drivetrain: rank 1 failed first: it ended with exit code 1$",
        ),
    ],
)
def test_a_rank_that_fails_before_a_run_begins_is_named_at_once(
    tmp_path: Path, before: str, after: str, last: str
) -> None:
    program = JOINING.replace("BEFORE", before).replace("AFTER", after)
    (tmp_path / "program.py").write_text(FAILING + program, encoding="utf-8")
    started = time.monotonic()
    errors = python("program.py", expected=1).stderr.splitlines()
    assert re.search(last, errors[-1]), "\n".join(errors)
    shown = [each for each in errors if each.endswith("ValueError: no data")]
    assert len(shown) == ("raise" in before + after)
    assert time.monotonic() - started < 60, "torch waits for minutes"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's end of a parent's children")
def test_ranks_end_when_rank_0_is_killed(tmp_path: Path) -> None:
    program = "if rank == 0:\n    time.sleep(1)\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    (tmp_path / "program.py").write_text(FAILING + program, encoding="utf-8")
    python("program.py", expected=-signal.SIGKILL)


def test_what_a_rank_starts_does_not_take_itself_for_a_rank_that_has_lost_its_parent(tmp_path: Path) -> None:
    program = """
import subprocess, sys
from drivetrain.distributed.launch.programs import ensure_ranks
rank = ensure_ranks(2).rank
if rank == 1 and len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "inner"], check=True)
sys.stdout.write(f"{rank} {sys.argv[1:]}\\n")
"""
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    assert sorted(python("program.py").stdout.splitlines()) == ["0 []", "1 ['inner']", "1 []"]


@pytest.mark.parametrize(("typed", "words"), [(FAILING, ["-"]), (FAILING, []), ("", ["-i", "-c", FAILING])])
def test_a_program_without_a_command_to_run_again_is_told_so(typed: str, words: list[str]) -> None:
    done = python(*words, typed=typed, expected=0 if "-i" in words else 1)
    assert "StrategyError: devices=2 needs 2 processes, but this program cannot be run again" in done.stderr
    assert "then fork the process; Trainer.steps and Engine cannot" in done.stderr


def test_neither_a_run_of_tests_nor_a_multiprocessing_process_is_run_again(monkeypatch) -> None:
    obstacle = rerun_obstacle()
    assert obstacle is not None
    assert "tests" in obstacle
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert rerun_obstacle() == "it is interactive"


def test_a_launchers_job_is_taken_as_it_is(monkeypatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert ensure_ranks(2, 2) == ProcessEnvironment("torchrun", 1, 4, 1, 2, "a")
    with pytest.raises(
        StrategyError,
        match=r"torchrun has started 4 processes, but devices=2 and num_nodes=1 ask for 2\. Give",
    ):
        ensure_ranks(2)


def test_several_machines_need_a_launcher_and_one_process_needs_nothing(monkeypatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        StrategyError, match=r"num_nodes=2 needs a launcher.*drivetrain launch --nodes 2.*srun"
    ):
        ensure_ranks(4, 2)
    assert ensure_ranks(1).world_size == 1


def test_another_number_of_ranks_in_the_same_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILING + "ensure_ranks(3)", encoding="utf-8")
    done = python("program.py", expected=1)
    assert "already runs as 2 processes, which its first devices=... has started" in done.stderr


def test_the_words_for_an_end() -> None:
    assert ending(3) == "ended with exit code 3"
    assert ending(-signal.SIGTERM) == "was killed by SIGTERM"
    assert ending(-1000) == "was killed by signal 1000"


def test_threads_are_shared_unless_the_user_has_said_how_many() -> None:
    assert threads_per_rank(1_000_000, {}) == 1
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "7"}) is None


def test_waiting_for_a_process_has_an_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child = Child(1, process.pid, process.poll)
    assert wait_for([child], 0.1) == [child]
    child.end(signal.SIGKILL)
    assert wait_for([child], 10) == []
    child.end(signal.SIGKILL)  # nobody is there any more, or somebody else is, who is left alone
