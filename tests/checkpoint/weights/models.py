"""Modules whose weights are saved and loaded, and what no file may do."""

import os

from torch import nn


class Tied(nn.Module):  # two names for one parameter, and buffers
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


class Planted:  # whoever unpickles it makes this folder
    def __init__(self, folder) -> None:
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)
