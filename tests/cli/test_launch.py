"""`drivetrain launch` starts a program as several processes, and says which failed first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drivetrain.cli.launch import run
from drivetrain.core.errors import ConfigError
from drivetrain.distributed.failure.silence import activity

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
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.launch.programs import ensure_ranks

environment = ensure_ranks(2)
torch.distributed.init_process_group("gloo")
with FailureChannel(environment.rank, 2, describe=lambda: "update 3"):
    if sys.argv[1] == "raise" and str(environment.rank) == sys.argv[2]:
        raise ValueError("boom")
    torch.distributed.barrier()
torch.distributed.destroy_process_group()
words = [environment.launcher, environment.rank, os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, words)) + "\\n")
"""


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    command = "import sys; from drivetrain.cli.launch import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "program", [["program.py"], pytest.param(["-m", "program"], marks=pytest.mark.full)], ids=str
)
def test_a_program_runs_as_several_processes_with_its_arguments(program: list[str]) -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    done = launch("--devices", "2", *program, "fine", "--devices", "7")
    assert done.returncode == 0, done.stderr
    lines = sorted(line.split() for line in done.stdout.splitlines())
    threads = str(max(1, (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 2) // 2))
    assert lines == [["torchrun", rank, threads, "fine", "--devices", "7"] for rank in "01"]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("rank", [pytest.param("0", marks=pytest.mark.full), "1"])
def test_the_last_line_names_the_first_cause(rank: str) -> None:
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    done = launch("--devices", "2", "program.py", "raise", rank)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"drivetrain: rank {rank} failed first, at update 3: ValueError: boom"


def test_a_process_that_tells_nothing_is_named_by_its_exit_code() -> None:
    Path("program.py").write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))", encoding="utf-8")
    done = launch("--devices", "2", "program.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        7,
        "drivetrain: rank 1 failed first: it ended with exit code 7",
    )


def test_a_failed_program_is_started_again() -> None:
    program = "import os, sys\nsys.exit(os.environ['DRIVETRAIN_AGAIN'] == '0')"
    Path("program.py").write_text(program, encoding="utf-8")
    assert launch("--max-restarts", "1", "--devices", "1", "program.py").returncode == 0


ALONE = """
import os, sys, time
from tests.support.tasks import Regression, pairs, quiet
from drivetrain import LambdaCallback, Trainer

sys.stdout.write("started\\n")
sys.stdout.flush()

class Acts(LambdaCallback):
    def on_step_end(self, run):
        if run.progress.updates == 2:
            if sys.argv[1] == "raise":
                raise ValueError("boom")
            if sys.argv[1] == "hang":
                time.sleep(60)
            os.kill(os.getpid(), 15)

if sys.argv[1] == "refused":
    Trainer(max_epoch=3)
if sys.argv[1] == "usage":
    sys.exit(2)
quiet(max_epochs=1, callbacks=[Acts()], hang_timeout=2.0).fit(Regression(), pairs())
"""


def alone(*words: str) -> tuple[int, int, str]:
    """A program in one process: its exit code, how often it was started, its last line."""
    Path("program.py").write_text(ALONE, encoding="utf-8")
    done = launch("--devices", "1", *words)
    return done.returncode, done.stdout.count("started"), done.stderr.splitlines()[-1]


def test_the_last_line_names_the_cause_of_one_process_alone() -> None:
    what = "rank 0 failed first, in training, after update 2, in on_step_end of Acts: ValueError: boom"
    assert alone("program.py", "raise") == (1, 1, f"drivetrain: {what}")


@pytest.mark.full
def test_what_no_start_heals_is_not_started_again() -> None:
    code, starts, last = alone("--max-restarts", "2", "program.py", "refused")
    assert (code, starts) == (1, 1)
    assert "rank 0 failed first: ConfigError: " in last
    assert "'max_epochs'" in last
    # These import no torch, which saves half of the time.
    Path("usage.py").write_text("print('started'); raise SystemExit(2)", encoding="utf-8")
    assert alone("--max-restarts", "2", "usage.py")[:2] == (2, 1)
    Path("raises.py").write_text("print('started'); raise ValueError('boom')", encoding="utf-8")
    assert alone("--max-restarts", "1", "raises.py")[:2] == (1, 2)


@pytest.mark.full
def test_a_run_that_asks_for_a_requeue_is_not_started_again() -> None:
    assert alone("--max-restarts", "1", "program.py", "hang")[:2] == (75, 1)
    assert alone("--max-restarts", "1", "program.py", "signal")[:2] == (75, 1)


def test_an_option_behind_the_program_is_the_programs_and_that_is_said() -> None:
    told = "drivetrain: --max-restarts comes after program.py, so the program got it"
    code, _, last = alone("program.py", "usage", "--max-restarts", "2")
    assert code == 2
    assert last.startswith(told)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "two"], "--devices takes a number of processes or 'auto', not 'two'"),
        (["--devices", "0"], "not '0'"),
        (["--nodes", "2"], "--nodes 2 needs --address HOST of the first machine and --node-rank"),
        (["--nodes", "2", "--address", "a"], "--node-rank"),
        (["--nodes", "2", "--address", "a", "--node-rank", "2"], "--node-rank must be from 0 to 1, not 2"),
        (["--nodes", "1:2", "--address", "a", "--node-rank", "0"], "--nodes 1:2 needs --rendezvous"),
        (["--rendezvous", "a:1", "--node-rank", "0"], "leave out --address and --node-rank"),
        (["--rendezvous", "a:1", "--nodes", "1:4"], "all processes restart when a machine joins or leaves"),
        (["--max-restarts", "-1"], "--max-restarts takes a number, at least 0, not -1"),
        ([], "no file 'program.py'; for a module, write -m"),
        (["--nproc-per-node=2"], r"--nproc-per-node=2\. Here it is called '--devices'"),
        (["--nnodes", "2"], r"--nnodes\. Here it is called '--nodes'"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run([*words, "program.py"])


TRAINING = """
import os, time
from pathlib import Path
from drivetrain.distributed.launch.programs import join_job

join_job(int(os.environ["WORLD_SIZE"]), 1)
name = f"rank-{os.environ['RANK']}"
Path(name).with_suffix(".new").write_text(str(os.getpid()))
Path(name).with_suffix(".new").rename(name)
while True:
    time.sleep(0.05)
"""

LAUNCHERS = {
    "drivetrain launch": ("-m", "drivetrain", "launch", "--devices", "2"),
    "with restarts": ("-m", "drivetrain", "launch", "--devices", "2", "--max-restarts", "2"),
    "one process": ("-m", "drivetrain", "launch", "--devices", "1"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def has_ended(pid: int) -> bool:
    return activity(pid).state == "gone"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if name == "drivetrain launch" else pytest.mark.full)
        for name, words in LAUNCHERS.items()
    ],
)
def test_ranks_do_not_outlive_a_launcher_that_is_killed(words: tuple[str, ...]) -> None:
    Path("program.py").write_text(TRAINING, encoding="utf-8")
    size = 1 if "1" in words else 2
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    launcher = subprocess.Popen(
        [sys.executable, *words, "program.py"], env=environment, stderr=subprocess.DEVNULL
    )
    pids: list[int] = []
    try:
        assert happens(lambda: all(Path(f"rank-{each}").exists() for each in range(size)), 60)
        pids = [int(Path(f"rank-{each}").read_text(encoding="utf-8")) for each in range(size)]
        assert not any(map(has_ended, pids))
        launcher.kill()
        launcher.wait()
        assert happens(lambda: all(map(has_ended, pids)), 10), "ranks train on without their launcher"
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


def happens(expected: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not expected() and time.monotonic() < deadline:
        time.sleep(0.05)
    return expected()
