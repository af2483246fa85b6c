"""The loops that a user would write by hand: they do what the task does, and neither log nor check."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from peers.base import Peer
from workloads import Job


class Hand(Peer):
    """The reference."""

    def train(self, job: Job) -> None:
        """Train."""
        net: Any = job.net.to(job.device).train()
        parameters = list(net.parameters())
        optimizer = job.optimizer(parameters)
        if job.compiled:
            net = job.whole()
        half = job.precision == "bf16"
        for number, batch in enumerate(job.data, start=1):
            x, label = batch["x"], batch["label"]
            if job.device != "cpu":
                x, label = x.to(job.device, non_blocking=True), label.to(job.device, non_blocking=True)
            with torch.autocast(job.device, torch.bfloat16) if half else nullcontext():
                outputs = net(x)
                loss = job.loss(outputs, label)
            if not job.plain:
                job.scalars(outputs, label, loss)
            (loss / job.accumulation if job.accumulation > 1 else loss).backward()
            if number % job.accumulation:
                continue
            if job.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, job.clip)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, job: Job) -> float:
        """The mean over all samples, read once."""
        net = job.net.eval()
        total, count = torch.zeros(()), 0
        with torch.no_grad():
            for batch in job.data:
                label = batch["label"]
                total += job.loss(net(batch["x"]), label) * len(label)
                count += len(label)
        return total.item() / count

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        net = job.net.eval()
        with torch.no_grad():
            return [net(batch["x"]).cpu() for batch in job.data]


PEER = Hand()
