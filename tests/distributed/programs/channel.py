"""Two ranks with a failure channel, which do what the options say before the eighth of twelve collectives."""

import json
import os
import signal  # noqa: F401 - for the code of the options
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed

from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.failure.messages import TIMING
from drivetrain.distributed.launch.programs import ensure_ranks

options = {"act": "", "who": [0, 1], "skips": [], "join": "", "last": "", "after": "", "hang_timeout": None}
options |= {"heartbeat": 1.0, **json.loads(sys.argv[1])}
rank = ensure_ranks(2).rank
done = beats = 0


def kill(number):
    os.kill(os.getpid(), number)


def wait():
    Path(f"waits-{rank}").touch()
    until(lambda: all(Path(f"waits-{each}").exists() for each in options["who"]))
    Path("waiting").touch()
    time.sleep(600)


def until(holds):
    deadline = time.monotonic() + 200
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def describe():
    global beats
    beats += done == 7 and threading.current_thread() is not threading.main_thread()
    return f"step {done}"


def settle():
    if rank == 0:
        monitor = channel._monitor
        until(lambda: [each.where for each in monitor._peers.values()] == ["step 7"] * 2)
        ticks = monitor._ticks
        until(lambda: monitor._ticks > ticks + 1)
    else:
        until(lambda: beats > 4 and channel._rank_0_where == "step 7")


def act():
    exec(options["act"], globals())


def note(holds):  # make a file when something holds, whatever the main thread does
    threading.Thread(target=lambda: (until(holds), Path("noted").touch()), daemon=True).start()


distributed.init_process_group("gloo")
exec(options["join"])
with FailureChannel(
    rank,
    2,
    # What ends in time on a quiet machine must also do so on one that is ten times slower.
    timing=replace(TIMING.scaled(3), heartbeat=options["heartbeat"]),
    status=Status(describe, lambda: done),
    hang_timeout=options["hang_timeout"],
    directory=Path.cwd() / "run",
) as channel:
    for step in range(12):
        if step == 7 and rank in options["who"] and options["act"]:
            settle()
            act()
        if step != 7 or rank not in options["skips"]:
            distributed.all_reduce(torch.ones(1))
        done += 1
    exec(options["last"])
exec(options["after"])
distributed.destroy_process_group()
sys.stdout.write(f"rank {rank} ended\n")
