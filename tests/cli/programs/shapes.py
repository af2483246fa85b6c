"""A user's module: a task and data in every form."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, TaskModule


class Shapes(TaskModule):
    def __init__(self, hidden: int = 8, rate: float = 0.1, kind: Literal["relu", "tanh"] = "relu", name=None):
        super().__init__()
        middle = nn.ReLU() if kind == "relu" else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(4, hidden), middle, nn.Linear(hidden, 2))
        self.rate = rate

    def forward(self, features):
        return self.net(features)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch["label"])

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=self.rate)


class Needy(Shapes):
    def __init__(self, classes: int):
        super().__init__()


def batches(count):
    generator = torch.Generator().manual_seed(count)
    features = torch.randn(count, 8, 4, generator=generator)
    return [{"features": each, "label": (each.sum(1) > 0).long()} for each in features]


class Data:
    def __init__(self, count: int = 5):
        self.count = count

    def train_data(self):
        return batches(self.count)

    def validation_data(self):
        return batches(3)

    def test_data(self):
        return batches(2)

    predict_data = test_data


data = Data()
ready = batches(4)


def make_data(count: int = 6):
    return Data(count)
