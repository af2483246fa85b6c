"""Lightning Fabric: a loop of one's own over its `setup`, `backward` and loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from tqdm import tqdm

from peers.base import Peer
from workloads import Job


def fabric(job: Job) -> Fabric:
    """A Fabric with what is asked for."""
    loggers: list[Any] = []
    if job.everything:
        loggers = [TensorBoardLogger(job.directory), CSVLogger(job.directory)]
    made = Fabric(
        accelerator=job.device,
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
        loggers=loggers,
    )
    made.launch()
    return made


class FabricLoop(Peer):
    """Lightning Fabric."""

    lacks: ClassVar[Mapping[str, str]] = {
        "returned": "the loop is one's own: means are summed by hand",
        "callbacks": "they are called by one's own loop",
        "hooks": "they are called by one's own loop",
    }

    def train(self, job: Job) -> None:
        """Train."""
        made = fabric(job)
        net = job.whole()
        net, optimizer = made.setup(net, job.optimizer(net.parameters()))
        net.train()
        loader = job.loader or job.device != "cpu"
        data: Any = made.setup_dataloaders(as_loader(job)) if loader else job.data
        for number, batch in enumerate(tqdm(data) if job.everything else data, start=1):
            whole = number % job.accumulation == 0
            with made.no_backward_sync(net, enabled=not whole):
                outputs = net(batch["x"])
                loss = job.loss(outputs, batch["label"])
                scalars = {} if job.plain else job.scalars(outputs, batch["label"], loss)
                made.backward(loss / job.accumulation if job.accumulation > 1 else loss)
            if not whole:
                continue
            if job.clip is not None:
                made.clip_gradients(net, optimizer, max_norm=job.clip)
            optimizer.step()
            optimizer.zero_grad()
            if job.everything and number % 50 == 0:
                made.log_dict({"loss": loss, **scalars}, step=number)
        for logger in made.loggers:
            logger.finalize("success")

    def evaluate(self, job: Job) -> float:
        """The mean over all samples, summed by one's own loop."""
        net = fabric(job).setup(job.net).eval()
        total, count = torch.zeros(()), 0
        with torch.no_grad():
            for batch in job.data:
                label = batch["label"]
                total += job.loss(net(batch["x"]), label) * len(label)
                count += len(label)
        return total.item() / count

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        net = fabric(job).setup(job.net).eval()
        with torch.no_grad():
            return [net(batch["x"]).cpu() for batch in job.data]


def as_loader(job: Job) -> Any:
    """The data as a DataLoader, where it has to be moved to a device."""
    return job.data if job.loader else torch.utils.data.DataLoader(job.data, batch_size=None)


PEER = FabricLoop()
