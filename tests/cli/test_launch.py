"""`drivetrain launch` starts a program as several processes, and says which failed first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drivetrain.cli.launch import run
from drivetrain.errors import ConfigError

JOB = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)

PROGRAM = """
import os, sys, time
import torch
from drivetrain.distributed.failure import FailureChannel
from drivetrain.distributed.launch import ensure_ranks

environment = ensure_ranks(2)
torch.distributed.init_process_group("gloo")
with FailureChannel(environment.rank, 2, describe=lambda: "update 3"):
    if sys.argv[1] == "raise" and environment.rank == 1:
        raise ValueError("boom")
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
words = [environment.launcher, environment.rank, os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")
"""


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    command = "import sys; from drivetrain.cli.launch import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("program", [["program.py"], ["-m", "program"]])
def test_a_program_runs_as_several_processes_with_its_arguments(program: list[str]) -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    done = launch("--devices", "2", *program, "fine", "--devices", "7")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    threads = str(max(1, (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 2) // 2))
    assert lines == [["torchrun", rank, threads, "fine", "--devices", "7"] for rank in "01"]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_the_last_line_names_the_first_cause() -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    done = launch("--devices", "2", "program.py", "raise")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "drivetrain: rank 1 failed first, at update 3: ValueError: boom"


def test_a_process_that_tells_nothing_is_named_by_its_exit_code() -> None:
    Path("program.py").write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))", encoding="utf-8")
    done = launch("--devices", "2", "program.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        7,
        "drivetrain: rank 1 failed first: it ended with exit code 7",
    )


def test_a_failed_program_is_started_again() -> None:
    program = "import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    Path("program.py").write_text(program, encoding="utf-8")
    assert launch("--max-restarts", "1", "--devices", "1", "program.py").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "two"], "--devices takes a number of processes or 'auto', not 'two'"),
        (["--devices", "0"], "not '0'"),
        (["--nodes", "2"], "--nodes 2 needs --address HOST, the first machine, and --node-rank"),
        (["--nodes", "2", "--address", "a"], "--node-rank"),
        (["--nodes", "2", "--address", "a", "--node-rank", "2"], "--node-rank 2 is none of 0 to 1"),
        (["--nodes", "1:2", "--address", "a", "--node-rank", "0"], "--nodes 1:2 needs --rendezvous"),
        (["--rendezvous", "a:1", "--node-rank", "0"], "leave out --address and --node-rank"),
        ([], "there is no program 'program.py' here; for a module, write -m"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run([*words, "program.py"])
