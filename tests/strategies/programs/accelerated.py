"""A fit under accelerate; prints its precision, its samples, and the classes of its modules."""

import json
import sys

import torch
from torch import nn

from drivetrain import AccelerateConfig, LambdaCallback, TaskModule, Trainer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.line(x).tanh()


class Deep(TaskModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()


kinds = set()
look = LambdaCallback(
    on_step_end=lambda run: kinds.update(type(each).__name__ for each in run.task.modules())
)
strategy = AccelerateConfig(**json.loads(sys.argv[1]))
quiet = {"loggers": (), "checkpoint": False, "progress_bar": False, "callbacks": [look]}
trainer = Trainer(max_epochs=1, strategy=strategy, devices=2, **quiet)
result = trainer.fit(Deep(), [{"x": torch.ones(2, 4)}] * 8)
found = {"precision": trainer.precision.name, "samples": result.progress.samples}
sys.stdout.write(json.dumps({**found, "kinds": sorted(kinds - {"Deep", "Sequential"})}) + "\n")
