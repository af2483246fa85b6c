"""A program of two ranks with a failure channel, run to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.support.forked import Forked


class Ended(NamedTuple):
    """How a program has ended: its code, what it has written, and the lines of its errors."""

    code: int
    out: str
    errors: list[str]


JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from torch import distributed
from dataclasses import replace
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.failure.messages import TIMING
from drivetrain.distributed.launch.programs import ensure_ranks

environment = ensure_ranks(2)
rank, done = environment.rank, 0
kill = lambda number: os.kill(os.getpid(), number)

def act(update):
    HERE

distributed.init_process_group("gloo")
JOIN
with FailureChannel(
    rank,
    2,
    timing=replace(TIMING.scaled(0.3), silence=SILENCE),
    describe=lambda: f"update {done}",
    progress=lambda: done,
    hang_timeout=LIMIT,
    directory=Path.cwd() / "run",
):
    for update in range(12):
        if update == 7:
            time.sleep(0.8)  # so that all have told how far they are
            if act(update):  # whether to leave the collective out
                done += 1
                continue
        distributed.all_reduce(torch.ones(1))
        done += 1
    LAST
AFTER
distributed.destroy_process_group()
sys.stdout.write(f"rank {rank} ended\\n")
"""


def undisturbed() -> dict[str, str]:
    """An environment in which a program is alone, whatever the tests run in."""
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    return {**environment, "OMP_NUM_THREADS": "1"}


def together(
    act: str = "pass",
    last: str = "pass",
    limit: float | None = None,
    join: str = "",
    after: str = "pass",
    silence: float = 1.0,
) -> str:
    """The program of two ranks that do something before the eighth of twelve collectives.

    Args:
        act: What they do, the body of a function of `rank` and `update`; true to leave the collective out.
        last: What they do at the end, in the channel.
        limit: The channel's `hang_timeout`.
        join: What they do before it.
        after: What they do after it.
        silence: The channel's time of that name; the others are three tenths of the usual ones.
    """
    program = PROGRAM.replace("HERE", act).replace("LIMIT", repr(limit)).replace("LAST", last)
    program = program.replace("JOIN", join).replace("AFTER", after)
    return program.replace("SILENCE", repr(silence))


def run_together(act: str, **options: Any) -> Ended:
    """`run_program` of what `together` makes of these arguments."""
    return run_program(together(act, **options))


def run_program(program: str, directory: Path | None = None, **options: Any) -> Ended:
    """A program of several ranks, run to its end.

    Args:
        program: The text.
        directory: Where it runs; None for here.
        **options: As in `run_written`.
    """
    directory = Path.cwd() if directory is None else directory
    (directory / "program.py").write_text(program, encoding="utf-8")
    return run_written(directory, **options)


def run_written(
    directory: Path,
    interrupt: signal.Signals | None = None,
    whole_group: bool = False,
    again: float | None = None,
    **variables: str,
) -> Ended:
    """The program that is in a directory, run to its end.

    A rank that was left behind would hold the output open, and so be found.

    Args:
        directory: Where it is, and runs.
        interrupt: A signal for rank 0, a second after it has made a file "waiting".
        whole_group: Whether the signal is for all ranks, as a terminal's.
        again: After so many seconds it is sent once more.
        **variables: For its environment.
    """
    process = Forked(["program.py"], directory, {**undisturbed(), **variables})
    try:
        if interrupt:
            deadline = time.monotonic() + 30
            while not (directory / "waiting").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1.0)
            (os.killpg if whole_group else os.kill)(process.pid, interrupt)
            if again is not None:
                time.sleep(again)
                (os.killpg if whole_group else os.kill)(process.pid, interrupt)
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=240)
        pytest.fail(f"a rank has not ended:\n{out}\n{err}")
    assert process.returncode is not None
    return Ended(process.returncode, out, err.splitlines())
