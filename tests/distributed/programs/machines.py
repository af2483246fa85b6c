"""A program that is started on several machines: it trains to its end, or saves each step in "run"."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import drivetrain
from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule, Trainer

quiet = {"max_epochs": 1, "loggers": (), "progress_bar": False}


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)

    def loss(self, outputs, batch):
        return F.mse_loss(outputs, batch["y"])

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=0.05)


class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


def saved(folder, last=None, resume="auto", devices="auto"):
    """Save each step, up to the last one or until there is a file "stop"; say which steps have begun."""

    def look(run):
        if drivetrain.rank() == 0 and last is None:
            with open("steps", "a", encoding="ascii") as file:
                file.write(f"{run.progress.steps} {drivetrain.world_size()}\n")
        if run.progress.steps == last or Path("stop").exists():
            run.stop("asked for")

    checkpoint = CheckpointConfig(every=1, keep_last=None)
    options = {"run_dir": folder, "callbacks": [LambdaCallback(on_step_end=look)], "checkpoint": checkpoint}
    trainer = Trainer(batch_size=2, devices=devices, **options, **quiet)
    trainer.fit(Line(), Points(100_000), resume=resume)


if __name__ == "__main__":
    fails = [each for each in sys.argv if each.startswith("fails=")]
    if fails == [f"fails={os.uname().nodename}"]:
        raise OSError("a broken installation")
    if "saved" in sys.argv:
        saved("run")
    else:
        task = Line()
        progress = Trainer(checkpoint=False, batch_size=2, **quiet).fit(task, Points(64)).progress
        found = {"rank": drivetrain.rank(), "host": os.uname().nodename, "steps": progress.steps}
        found["weights"] = torch.cat([each.detach().flatten() for each in task.parameters()]).tolist()
        sys.stdout.write(json.dumps(found) + "\n")
