"""A training on several ranks, of which the ranks `who` run `act` at the location `where`."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from tests.support.tasks import Blocks
from torch import nn

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, Trainer
from drivetrain.distributed.failure import messages

options = {"strategy": "ddp", "devices": 2, "workers": 0, "hang_timeout": None, **json.loads(sys.argv[1])}
who = options.get("who", [options["devices"] - 1])
messages.TIMING = replace(messages.TIMING.scaled(3), heartbeat=1.0)


def act(here):
    if here == options["where"] and torch.distributed.get_rank() in who:
        exec(options["act"], globals())


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def wait():
    Path("waiting").touch()
    time.sleep(600)


class Task(Blocks):
    steps = 0

    def forward(self, x):
        self.steps += 1
        if self.steps == 3:
            act("forward")
        return super().forward(x)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40 * options["devices"]

    def __getitem__(self, index):
        if index >= 48:
            act("dataset")
        return torch.ones(8)


class Acts(Callback):
    def on_step_end(self, run):
        if run.progress.steps == 3:
            act("step end")

    def on_checkpoint_saved(self, run):
        act("save")

    def on_evaluation_start(self, run):
        act("evaluation start")

    def on_evaluation_end(self, run):
        act("evaluation end")

    def on_epoch_end(self, run):
        act("epoch end")


trainer = Trainer(
    strategy=options["strategy"], devices=options["devices"], max_epochs=1, callbacks=[Acts()], run_dir="run",
    loggers=(), progress_bar=False, checkpoint=CheckpointConfig(every="2 steps", by=None),
    hang_timeout=options["hang_timeout"],
)  # fmt: skip
task = Task(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 8, OptimizerConfig("sgd", lr=0.1))
data = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=options["workers"])
validation = [torch.ones(2, 8)] * 4
if options["where"] == "body":
    for result in trainer.steps(task, data, validation):
        if result.step == 1:
            act("body")
else:
    trainer.fit(task, data, validation)
sys.stdout.write("ended\n")
