"""A program that cannot be run again forks its ranks; the option `case` says what happens in them."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import torch
from torch import distributed

from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.failure.messages import TIMING
from drivetrain.distributed.group import disband, join
from drivetrain.distributed.launch.forks import fork_ranks

PATIENT = replace(TIMING.scaled(3), heartbeat=1.0)


def rank():
    return int(os.environ["RANK"])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise LookupError("no such column")


def summed(before=lambda: None, on=1):
    distributed.init_process_group("gloo")
    try:
        if rank() == on:
            before()
        total = torch.tensor([rank() + 1.0])
        distributed.all_reduce(total)
        return [*total.tolist(), torch.get_num_threads()]
    finally:
        distributed.destroy_process_group()


def stops():
    with FailureChannel(rank(), 2, timing=PATIENT, status=Status(lambda: "step 7")):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        distributed.barrier()


def joins(before):
    def work():
        if rank() == 1:
            before()
        try:
            join(2, "cpu").ranks.close()
        finally:
            disband()

    return work


def interrupts():
    if rank() == 0:
        raise KeyboardInterrupt
    time.sleep(600)


def reads():
    return 0 if os.readlink("/proc/self/fd/0") == os.devnull or rank() == 0 else 1 / 0


CASES = {
    "raises": lambda: summed(fail),
    "raises on 0": lambda: summed(fail, on=0),
    "killed": lambda: summed(kill),
    "stops": lambda: summed(stops, on=rank()),
    "raises before it joins": joins(lambda: 1 / 0),
    "killed before it joins": joins(kill),
    "ends before it joins": joins(lambda: os._exit(0)),
    "interrupts": interrupts,
    "reads": reads,
}
os.dup2(os.open(__file__, os.O_RDONLY), 0)
sys.stdout.write("once\n")
try:
    told = fork_ranks(CASES[json.loads(sys.argv[1])["case"]], 2)
except BaseException as error:
    told = f"{type(error).__name__}: {error}\n{error.__cause__}"
found = [told, fork_ranks(lambda: summed(), 2), fork_ranks(lambda: summed(), 3)]
sys.stdout.write(json.dumps(found) + "\n")
