"""Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from peers.base import Peer
from workloads import Job

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(LightningModule):
    """A job's task."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.net = job.whole()
        self.job = job

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """A micro-batch."""
        job = self.job
        outputs = self.net(batch["x"])
        loss = job.loss(outputs, batch["label"])
        if not job.plain:
            scalars = job.scalars(outputs, batch["label"], loss)
            if job.everything:
                self.log("loss", loss, prog_bar=True)
                self.log_dict(scalars, prog_bar=True)
            else:
                self.log_dict(scalars, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        """A batch."""
        self.log("loss", self.job.loss(self.net(batch["x"]), batch["label"]), batch_size=len(batch["label"]))

    def predict_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        """A batch."""
        return self.net(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self.job.optimizer(self.parameters())


class HooksInTheStep(Callback):
    """Overrides the two hooks of every step and does nothing in them."""

    def on_train_batch_start(self, *_: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Nothing."""


class InMemory:
    """Any iterable will do for the data, but a list is taken for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def data(job: Job) -> Any:
    """The job's data."""
    return job.data if job.loader else InMemory(job.data)


def trainer(job: Job) -> Trainer:
    """A Trainer with everything off that is not asked for."""
    loggers: Any = False
    if job.everything:
        loggers = [TensorBoardLogger(job.directory), CSVLogger(job.directory)]
    kind = HooksInTheStep if job.hooks else Callback
    return Trainer(
        max_epochs=1,
        accelerator=job.device,
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        logger=loggers,
        log_every_n_steps=50,
        enable_checkpointing=False,
        enable_progress_bar=job.everything,
        enable_model_summary=False,
        use_distributed_sampler=False,
        gradient_clip_val=job.clip,
        accumulate_grad_batches=job.accumulation,
        callbacks=[kind() for _ in range(job.callbacks)],
    )


class LightningPeer(Peer):
    """Lightning."""

    def train(self, job: Job) -> None:
        """Train."""
        trainer(job).fit(Module(job), data(job))

    def evaluate(self, job: Job) -> float:
        """The mean over all samples."""
        return trainer(job).validate(Module(job), data(job), verbose=False)[0]["loss"]

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        return trainer(job).predict(Module(job), data(job))


PEER = LightningPeer()
