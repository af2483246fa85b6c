"""What launchers start; the first argument says what it does."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback, Trainer
from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.launch.programs import ensure_ranks, join_job


def act(run):
    if run.progress.steps == 2:
        if what == "alone raise":
            raise ValueError("boom")
        if what == "alone hang":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGTERM)


what = " ".join(sys.argv[1:])
sys.stdout.write("started\n")
sys.stdout.flush()
if what == "alone refused":
    Trainer(max_epoch=3)
elif what.startswith("alone"):
    trainer = quiet(max_epochs=1, callbacks=[LambdaCallback(on_step_end=act)], hang_timeout=2.0)
    trainer.fit(Regression(), pairs())
elif what == "wait":
    join_job(int(os.environ["WORLD_SIZE"]), 1)
    name = Path(f"rank-{os.environ['RANK']}")
    name.with_suffix(".new").write_text(str(os.getpid()), encoding="ascii")
    name.with_suffix(".new").rename(name)
    if os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock
    while True:
        time.sleep(0.05)
else:
    environment = ensure_ranks(2)
    torch.distributed.init_process_group("gloo")
    with FailureChannel(environment.rank, 2, status=Status(lambda: "step 3")):
        if what == f"raise {environment.rank}":
            raise ValueError("boom")
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    words = [environment.launcher, environment.rank, os.environ["OMP_NUM_THREADS"], *sys.argv[1:]]
    sys.stdout.write(f"{' '.join(map(str, words))}\n")
