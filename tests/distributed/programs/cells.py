"""The first cell of a notebook: a task, its data, and a function that trains it and prints what came out."""

import json

import torch
from torch import nn
from torchmetrics import MeanSquaredError

from drivetrain import TaskModule, Trainer


class Deep(TaskModule):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)

    def loss(self, outputs, batch):
        return (outputs - batch["y"]).square().mean()

    def metrics(self):
        return {"error": MeanSquaredError()}


draw = torch.Generator().manual_seed(0)
data = [{name: torch.rand(2, 8, generator=draw) for name in "xy"} for _ in range(8)]


def found(**options):
    """Train and validate."""
    trainer = Trainer(max_epochs=2, loggers=(), progress_bar=False, **options)
    torch.manual_seed(0)
    task = Deep()
    result = trainer.fit(task, data, data)
    values = {**result.metrics, **trainer.validate(task, data), "updates": result.progress.updates}
    weights = {name: value.flatten().tolist() for name, value in task.state_dict().items()}
    print(json.dumps([values, weights]))
