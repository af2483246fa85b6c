"""Two processes of multiprocessing, the second of which ends before the first."""

import os
import time

import torch
from torch import nn

from drivetrain import Engine
from drivetrain.distributed.sockets import reserve_port


def main(rank, port):
    job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in job.items()})
    engine = Engine("ddp", devices=2)
    model, optimizer = engine.prepare(nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    engine.backward(model(torch.ones(2, 2)).square().mean())
    engine.step(optimizer)
    time.sleep(3 - 3 * rank)


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, (reserve_port(),), nprocs=2, start_method="fork")
