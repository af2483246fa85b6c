"""A program that a launcher may start: it trains, then evaluates on all ranks together and on each alone."""

import json
import os
import signal
import sys

import torch
from torch import nn

import drivetrain
from drivetrain import AccelerateConfig, LambdaCallback, StrategyError, TaskModule, Trainer
from drivetrain.strategies import SingleDevice


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.line(x).tanh()


class Deep(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()


data = [{"x": torch.full((2, 4), float(index))} for index in range(8)]
quiet = {"loggers": (), "checkpoint": False, "progress_bar": False}
given = json.loads(sys.argv[-1]) if sys.argv[-1].startswith("{") else {}
if given.pop("alone first", False):
    Trainer(max_epochs=1, **quiet).fit(Deep(), data)
if "accelerate" in given:
    given["strategy"] = AccelerateConfig(config_file=given.pop("accelerate"))
task, blocks = Deep(), set()
kills = given.pop("kill", False) and drivetrain.rank() == 1


def look_at(run):
    blocks.add(type(run.task.blocks[0]).__name__)
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)


look = LambdaCallback(on_step_end=look_at)
trainer = Trainer(max_epochs=1, callbacks=[look], **given, **quiet)
strategy = trainer.select_strategy()
progress = trainer.fit(task, data).progress
told = []
for one in ({"strategy": "single"}, {"devices": 1}):
    try:
        Trainer(**one, **quiet)
    except StrategyError as error:
        told.append(str(error))
values = [Trainer(**given, **quiet).validate(task, data)["validation/loss"]]
if drivetrain.world_size() > 1 and strategy.name == "ddp":
    for one in (Trainer(**quiet), Trainer(strategy=SingleDevice("cpu"), **quiet)):
        values.append(one.validate(task, data)["validation/loss"])
found = {
    "strategy": strategy.name,
    "block": blocks.pop(),
    "precision": trainer.precision.name,
    "samples": progress.samples,
    "steps": progress.steps,
    "told": ["An evaluation does not need a single process: on several each sample" in each for each in told],
    "same": len({round(each, 5) for each in values}) == 1,
    "value": round(values[0], 4),
}
sys.stdout.write(json.dumps(found) + "\n")
