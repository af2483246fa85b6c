"""Modules whose weights are saved and loaded."""

from torch import nn


class Tied(nn.Module):
    """Two names for one parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
