"""`drivetrain launch` starts a program as several processes, and says which failed first."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import PROGRAMS
from tests.support.forked import run_forked

from drivetrain.distributed.failure.heartbeat import activity

# The launcher is forked; torchrun and each rank are new interpreters, of three seconds each.
pytestmark = pytest.mark.real
landing, nightly = pytest.mark.landing, pytest.mark.nightly

JOB = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS")


def job_environment() -> dict[str, str]:
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    others = {name: value for name, value in os.environ.items() if not JOB.fullmatch(name)}
    return {**others, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def launch(*words: str, devices: int = 1, program: str = "launched.py") -> tuple[int, list[str], str]:
    if not Path(program).exists() and not program.startswith("-m"):
        shutil.copy(PROGRAMS / program, program)
    options, arguments = (words[: words.index("--")], words[words.index("--") + 1 :])
    command = [str(PROGRAMS / "command.py"), "launch", "--devices", f"{devices}", *options, *program.split()]
    done = run_forked([*command, *arguments], Path.cwd(), job_environment(), timeout=600)
    return done.returncode, done.stdout.splitlines(), (done.stderr.splitlines() or [""])[-1]


@landing
def test_a_module_runs_as_several_processes_with_its_arguments() -> None:
    shutil.copy(PROGRAMS / "launched.py", "launched.py")
    code, lines, last = launch("--", "fine", "--devices", "7", devices=2, program="-m launched")
    assert code == 0, last
    threads = str(max(1, (len(os.sched_getaffinity(0)) if sys.platform == "linux" else 2) // 2))
    ended = sorted(line.split() for line in lines if line != "started")
    assert ended == [["torchrun", rank, threads, "fine", "--devices", "7"] for rank in "01"]


@landing
def test_machines_without_numbers_meet_at_a_rendezvous() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ("--nodes", "1", "--rendezvous", place, "--log-dir", "logs")
    code, lines, last = launch(*options, "--", "fine", devices=2)
    assert (code, len(lines)) == (0, 2), last  # of rank 0 alone
    written = sorted(Path("logs").rglob("stdout.log"))
    assert [each.parent.name for each in written] == ["0", "1"]
    assert ["torchrun", "1"] in [line.split()[:2] for line in written[1].read_text().splitlines()]


@landing
def test_the_last_line_names_the_first_cause() -> None:
    code, _, last = launch("--", "raise", "1", devices=2)
    assert (code, last) == (1, "drivetrain: rank 1 failed first, at step 3: ValueError: boom")


@landing
def test_a_silent_process_is_named_by_its_exit_code_and_all_but_a_usage_error_is_started_again() -> None:
    Path("silent.py").write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))", encoding="utf-8")
    code, _, last = launch("--", devices=2, program="silent.py")
    assert (code, last) == (7, "drivetrain: rank 1 failed first: it ended with exit code 7")
    Path("again.py").write_text("import os; 1 / int(os.environ['DRIVETRAIN_AGAIN'])", encoding="utf-8")
    assert launch("--max-restarts", "1", "--", program="again.py")[0] == 0
    Path("usage.py").write_text("print('started'); raise SystemExit(2)", encoding="utf-8")
    code, lines, _ = launch("--max-restarts", "1", "--", "--nodes", "2", program="usage.py")
    assert (code, lines) == (2, ["started"])


@nightly
def test_launch_restarts_an_exception_and_not_what_no_restart_heals() -> None:
    code, lines, last = launch("--max-restarts", "2", "--", "alone", "refused")
    assert (code, lines, "rank 0 failed first: ConfigError: " in last) == (1, ["started"], True)
    assert launch("--max-restarts", "1", "--", "alone", "raise")[:2] == (1, ["started"] * 2)
    for asks_for_a_requeue, says in {"hang": "no progress for 2 s", "signal": "exit code 75"}.items():
        code, lines, last = launch("--max-restarts", "1", "--", "alone", asks_for_a_requeue)
        assert (code, lines, says in last) == (75, ["started"], True)


@nightly
def test_a_rank_that_ends_before_the_others_have_connected_ends_the_launch() -> None:
    join = "from drivetrain.distributed import group; from drivetrain.distributed.launch import programs"
    early = (
        f"import os\nif os.environ['RANK'] == '0':\n    {join}; programs.join_job(2, 1); group.join(2, 'cpu')"
    )
    Path("early.py").write_text(early, encoding="utf-8")
    code, _, last = launch("--", devices=2, program="early.py")
    assert (code, last) == (1, "drivetrain: rank 0 failed first: it ended with exit code 1")


def happens(expected: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not expected() and time.monotonic() < deadline:
        time.sleep(0.05)
    return expected()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@landing
def test_ranks_do_not_outlive_a_launcher_that_is_killed() -> None:
    def has_ended(pid: int) -> bool:
        return activity(pid).state == "gone"

    command = ["drivetrain", "launch", "--devices", "2"]
    words = [sys.executable, "-m", *command, str(PROGRAMS / "launched.py"), "wait"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen(words, env=job_environment(), **quiet)
    ranks, pids = [Path("rank-0"), Path("rank-1")], list[int]()
    try:
        assert happens(lambda: all(each.exists() for each in ranks))
        pids = [int(each.read_text(encoding="ascii")) for each in ranks]
        assert not any(map(has_ended, pids))
        launcher.kill()
        launcher.wait()
        assert happens(lambda: all(map(has_ended, pids))), "ranks train on without their launcher"
    finally:
        launcher.kill()
        launcher.wait()
        for pid in pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
