"""Two ranks of multiprocessing train in a loop of their own; rank 0 goes on until rank 1 is gone."""

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import wait

import torch
from torch import nn

from drivetrain import Engine
from drivetrain.distributed.launch.children import environment_of
from drivetrain.distributed.sockets import reserved_port


def loop(rank, port, *others):
    os.environ.update(environment_of(rank, 2, port, threads=1))
    engine = Engine("ddp", devices=2)
    model, optimizer = engine.prepare(nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    engine.backward(model(torch.ones(2, 2)).square().mean())
    engine.step(optimizer)
    if rank == 0:
        wait(others)
        other = engine._channel._channel._monitor._peers[1]
        while other.state == "here":
            time.sleep(0.01)
        assert other.state == "left"


context = multiprocessing.get_context("fork")
with reserved_port() as port:
    one = context.Process(target=loop, args=(1, port))
    one.start()
    zero = context.Process(target=loop, args=(0, port, one.sentinel))
    zero.start()
    for each in (zero, one):
        each.join()
sys.stdout.write(f"{zero.exitcode} {one.exitcode}")
