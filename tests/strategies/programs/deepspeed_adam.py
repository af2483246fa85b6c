"""A fit with DeepSpeed's own Adam on the CPU, which it compiles."""

import torch
from torch.utils.data import TensorDataset

from drivetrain import DeepSpeedConfig, TaskModule, Trainer


class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    task = Task()
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 2}}
    strategy = DeepSpeedConfig(config=config, offload_optimizer="cpu")
    quiet = {"checkpoint": False, "loggers": (), "progress_bar": False}
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=1, batch_size=2, **quiet)
    trainer.fit(task, TensorDataset(torch.ones(8, 3)))
    if torch.distributed.get_rank() == 0:
        print([round(each.sum().item(), 4) for each in task.parameters()])
