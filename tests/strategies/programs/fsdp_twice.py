"""Two runs with FSDP in one program, each of which saves what it has trained."""

import torch
from torch import nn

from drivetrain import TaskModule, Trainer


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()


quiet = {"max_epochs": 1, "loggers": (), "progress_bar": False}
for name in ("first", "second"):
    task = Line()
    Trainer(strategy="fsdp", devices=2, run_dir=name, **quiet).fit(task, [{"x": torch.ones(2, 8)}] * 4)
    saved = Line.from_checkpoint(name)
    same = zip(task.parameters(), saved.parameters(), strict=True)
    print(all(torch.equal(mine, stored) for mine, stored in same))
