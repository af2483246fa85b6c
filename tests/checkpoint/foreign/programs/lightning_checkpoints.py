"""Lightning saves a checkpoint for each kind of hyper-parameter, and a state dict, in a folder."""

import argparse
import functools
import pathlib
import sys
import warnings

import lightning
import torch
from torch import nn

warnings.filterwarnings("ignore")


class Task(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, index):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


kinds = {
    "plain": 0.5,
    "partial": functools.partial(torch.optim.Adam),
    "module": nn.Sequential(nn.Linear(2, 2)),
    "namespace": argparse.Namespace(lr=0.1),
    "path": pathlib.Path("/data"),
}
for name, value in kinds.items():
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    task = Task(value)
    trainer.fit(task, torch.utils.data.DataLoader(torch.randn(8, 1), batch_size=4))
    trainer.save_checkpoint(f"{sys.argv[1]}/{name}.ckpt")
    torch.save(task.state_dict(), f"{sys.argv[1]}/{name}.pt")
