"""Freezing beside Lightning's `BackboneFinetuning`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pl = pytest.importorskip("lightning.pytorch")

from tests.integrations.lightning.equality import made, under_lightning, under_ours, weights_of  # noqa: E402

from drivetrain import Freeze  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]


class Theirs(pl.LightningModule):
    """A backbone and a head; the optimizer is given what is trainable at its making, as Lightning asks."""

    norm: Any = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), self.norm(8), nn.Tanh())
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.05)


class Ours(Theirs):
    """The same with the rates of `BackboneFinetuning`: the backbone's grows by half in each epoch."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.head.parameters(), "lr": 0.05},
            {"params": self.backbone.parameters(), "lr": 0.01},
        ]
        optimizer = torch.optim.AdamW(groups)
        rates = [lambda epoch: 1.0, lambda epoch: 1.5 ** max(0, epoch - 1)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]


def callback() -> Any:
    return pl.callbacks.BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_lr=0.01, train_bn=False
    )


def test_a_backbone_that_is_unfrozen_trains_as_under_lightning() -> None:
    theirs, ours = made(Theirs), made(Ours)
    under_lightning(theirs, max_epochs=3, callbacks=[callback()])
    under_ours(ours, max_epochs=3, callbacks=[Freeze("backbone", until="1 epoch")])
    torch.testing.assert_close(weights_of(ours), weights_of(theirs), rtol=0, atol=1e-6)


class NormTheirs(Theirs):
    norm = nn.BatchNorm1d


class NormOurs(NormTheirs):
    """The norm has the head's rate: under Lightning it trains from the start, whatever `train_bn` is."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.head.parameters(), *self.backbone[1].parameters()], "lr": 0.05},
            {"params": self.backbone[0].parameters(), "lr": 0.01},
        ]
        optimizer = torch.optim.AdamW(groups)
        rates = [lambda epoch: 1.0, lambda epoch: 1.5 ** max(0, epoch - 1)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]


def test_lightning_trains_the_batch_norms_of_a_frozen_backbone_which_exclude_gives() -> None:
    theirs, ours, excluded = made(NormTheirs), made(NormOurs), made(NormOurs)
    before = weights_of(ours.backbone)
    under_lightning(theirs, max_epochs=1, callbacks=[callback()])
    under_ours(ours, max_epochs=1, callbacks=[Freeze("backbone")])
    assert torch.equal(weights_of(ours.backbone), before)
    assert not torch.allclose(weights_of(theirs.backbone[1]), weights_of(ours.backbone[1]), atol=1e-2)
    theirs = made(NormTheirs)
    under_lightning(theirs, max_epochs=3, callbacks=[callback()])
    freeze = Freeze("backbone", until="1 epoch", exclude="backbone.1")
    under_ours(excluded, max_epochs=3, callbacks=[freeze])
    torch.testing.assert_close(weights_of(excluded), weights_of(theirs), rtol=0, atol=1e-6)
