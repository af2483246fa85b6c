"""The summary of a module, beside Lightning's of the same module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

from lightning import LightningModule
from lightning.pytorch.utilities.model_summary import ModelSummary

from drivetrain.callbacks import summarize

pytestmark = pytest.mark.full


class Lit(LightningModule):
    """A module of Lightning's around a network, with an example of its input."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net = net
        self.example_input_array = example

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False))
    net[2].weight = net[0].weight
    net[1].requires_grad_(False)
    return net


NETWORKS = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.ones(5, 8)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(6 * 64, 2)),
        torch.ones(2, 3, 8, 8),
    ),
    "tied and frozen": lambda: (_tied(), torch.ones(2, 5, dtype=torch.int64)),
    "attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        torch.ones(3, 5, 8),
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_parameters_shapes_and_operations_are_lightnings(kind: str) -> None:
    net, example = NETWORKS[kind]()
    theirs = ModelSummary(Lit(net, example), max_depth=-1)
    ours = summarize(Lit(net, example), depth=9, batch=example)
    assert (ours.total.parameters, ours.total.trainable) == (
        theirs.total_parameters,
        theirs.trainable_parameters,
    )
    by_name = {each.name: each for each in ours.modules}
    for name, count, sizes in zip(theirs.layer_names, theirs.param_nums, theirs.out_sizes, strict=True):
        row = by_name[name]
        assert row.parameters + row.shared == count
        if isinstance(sizes, list) and row.outputs is not None:
            shapes = [each for each in sizes if isinstance(each, list)] or [sizes]  # "?" is what is no tensor
            assert [list(each) for each in row.outputs] == shapes
    if kind != "attention":  # torch's counter does not know the fused kernel that Lightning's run takes
        assert ours.total.forward_flops == theirs.total_flops
