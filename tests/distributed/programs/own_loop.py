"""A loop of one's own on two ranks, of which the ranks `who` run `act` before the fifth step."""

import json
import os
import signal
import sys
import time

import torch
from torch import nn

from drivetrain import Engine

options = {"act": "", "who": [0, 1], "around": "loop()", **json.loads(sys.argv[1])}
engine = Engine("ddp", devices=2)
rank = engine.ranks.rank


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def pause():
    time.sleep(rank)


def loop():
    model, optimizer = engine.prepare(nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    for step in range(6):
        if step == 4 and rank in options["who"]:
            exec(options["act"])
        engine.backward(model(torch.ones(2, 2)).square().mean())
        engine.step(optimizer)


exec(options["around"])
sys.stdout.write(f"rank {rank} ended\n")
