"""A program that becomes two ranks; the option `then` is what they do."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from drivetrain.distributed.group import join
from drivetrain.distributed.launch.programs import ensure_ranks

rank = ensure_ranks(2).rank


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def until(path):
    while not Path(path).exists():
        time.sleep(0.01)


def joins(before=lambda: None, after=lambda: None):
    if rank == 1:
        before()
    join(2, "cpu")
    if rank == 1:
        after()
    torch.distributed.all_reduce(torch.ones(1))


def begins():  # begin a run and end it, as every run does; a group that one rank closes at once may not form
    member = join(2, "cpu")
    member.ranks.all_gather(rank)
    member.ranks.close()


def end_at_once():
    sys.stdout.flush()
    os._exit(0)


def fails():
    raise ValueError("no data")


exec(json.loads(sys.argv[1])["then"])
