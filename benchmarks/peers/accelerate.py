"""Accelerate: a loop of one's own over its `prepare`, `accumulate`, `backward` and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from peers.base import Peer
from workloads import Job


def accelerator(job: Job) -> Accelerator:
    """A fresh Accelerator: it keeps what is for all of a process in singletons."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    made = Accelerator(
        cpu=job.device == "cpu",
        mixed_precision="bf16" if job.precision == "bf16" else "no",
        gradient_accumulation_steps=job.accumulation,
        log_with="tensorboard" if job.everything else None,
        project_dir=str(job.directory),
    )
    if job.everything:
        made.init_trackers("benchmark")
    return made


class AccelerateLoop(Peer):
    """Accelerate. It has no CSV tracker, and so it writes TensorBoard's files only."""

    lacks: ClassVar[Mapping[str, str]] = {
        "returned": "the loop is one's own: means are summed by hand",
        "callbacks": "it has none",
        "hooks": "it has none",
    }

    def train(self, job: Job) -> None:
        """Train."""
        made = accelerator(job)
        net = job.whole()
        net, optimizer, data = made.prepare(net, job.optimizer(net.parameters()), as_loader(job))
        net.train()
        for number, batch in enumerate(tqdm(data) if job.everything else data, start=1):
            with made.accumulate(net):
                outputs = net(batch["x"])
                loss = job.loss(outputs, batch["label"])
                scalars = {} if job.plain else job.scalars(outputs, batch["label"], loss)
                made.backward(loss)
                if job.clip is not None and made.sync_gradients:
                    made.clip_grad_norm_(net.parameters(), job.clip)
                optimizer.step()
                optimizer.zero_grad()
            if job.everything and number % 50 == 0:
                logged = {name: each.item() for name, each in scalars.items()}
                made.log({"loss": loss.item(), **logged}, step=number)
        if job.everything:
            made.end_training()

    def evaluate(self, job: Job) -> float:
        """The mean over all samples, summed by one's own loop."""
        made = accelerator(job)
        net, data = made.prepare(job.net, as_loader(job))
        net.eval()
        total, count = torch.zeros(()), 0
        with torch.no_grad():
            for batch in data:
                label = batch["label"]
                total += job.loss(net(batch["x"]), label) * len(label)
                count += len(label)
        return total.item() / count

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        made = accelerator(job)
        net, data = made.prepare(job.net, as_loader(job))
        net.eval()
        with torch.no_grad():
            return [net(batch["x"]).cpu() for batch in data]


def as_loader(job: Job) -> DataLoader[Any]:
    """What it prepares is a DataLoader; the batches in memory are one that hands them on."""
    return job.data if job.loader else DataLoader(job.data, batch_size=None)


PEER = AccelerateLoop()
