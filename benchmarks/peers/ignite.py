"""Ignite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events
from ignite.handlers import TensorboardLogger
from ignite.metrics import Average, RunningAverage
from torch import Tensor

from peers.base import Peer
from workloads import Job


def ignore(engine: Any) -> None:
    """A handler that does nothing."""


class IgnitePeer(Peer):
    """Ignite. It has no CSV logger, and so it writes TensorBoard's files only."""

    lacks: ClassVar[Mapping[str, str]] = {
        "callbacks": "a handler is attached to an event, so there is none that is idle",
        "cuda": "its update function is one's own loop's body",
    }

    def train(self, job: Job) -> None:
        """Train."""
        net = job.net.train()
        parameters = list(net.parameters())
        optimizer = job.optimizer(parameters)

        def update(engine: Engine, batch: dict[str, Tensor]) -> Any:
            outputs = net(batch["x"])
            loss = job.loss(outputs, batch["label"])
            scalars = {} if job.plain else job.scalars(outputs, batch["label"], loss)
            (loss / job.accumulation if job.accumulation > 1 else loss).backward()
            if engine.state.iteration % job.accumulation == 0:
                if job.clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters, job.clip)
                optimizer.step()
                optimizer.zero_grad()
            return {"loss": loss.detach(), **scalars} if scalars else loss.detach()

        engine = Engine(update)
        for name in [] if job.plain else ["loss", *names(job)]:
            metric = RunningAverage if job.everything else Average
            metric(output_transform=lambda output, name=name: output[name]).attach(engine, name)
        for _ in range(job.callbacks):
            engine.add_event_handler(Events.ITERATION_STARTED, ignore)
            engine.add_event_handler(Events.ITERATION_COMPLETED, ignore)
        if not job.everything:
            engine.run(job.data, max_epochs=1)
            return
        ProgressBar().attach(engine, metric_names="all")
        with TensorboardLogger(log_dir=str(job.directory)) as logger:
            every = Events.ITERATION_COMPLETED(every=50)
            logger.attach_output_handler(engine, event_name=every, tag="training", metric_names="all")
            engine.run(job.data, max_epochs=1)

    def evaluate(self, job: Job) -> float:
        """The mean over all samples."""
        net = job.net.eval()

        def step(_: Engine, batch: dict[str, Tensor]) -> Any:
            with torch.no_grad():
                return job.loss(net(batch["x"]), batch["label"]), len(batch["label"])

        engine = Engine(step)
        Average(output_transform=lambda output: output[0]).attach(engine, "loss")
        return float(engine.run(job.data, max_epochs=1).metrics["loss"])

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        net, kept = job.net.eval(), []

        def step(_: Engine, batch: dict[str, Tensor]) -> Any:
            with torch.no_grad():
                kept.append(net(batch["x"]).cpu())

        Engine(step).run(job.data, max_epochs=1)
        return kept


def names(job: Job) -> list[str]:
    """The names of what a step computes beside its loss."""
    return [f"metric_{i}" for i in range(job.returned)] + ["accuracy"] * job.accuracy


PEER = IgnitePeer()
