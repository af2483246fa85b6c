"""torchtnt: a unit whose steps are one's own, run by its loops."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtnt.framework.callback import Callback
from torchtnt.framework.callbacks import TQDMProgressBar
from torchtnt.framework.evaluate import evaluate
from torchtnt.framework.predict import predict
from torchtnt.framework.state import State
from torchtnt.framework.train import train
from torchtnt.framework.unit import EvalUnit, PredictUnit, TrainUnit
from torchtnt.utils.loggers import CSVLogger, TensorBoardLogger

from peers.base import Peer
from workloads import Job

logging.getLogger("torchtnt").setLevel(logging.ERROR)


class Unit(TrainUnit[Any], EvalUnit[Any], PredictUnit[Any]):
    """A job's steps."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net = job.net
        self.parameters = list(job.net.parameters())
        self.optimizer = job.optimizer(self.parameters)
        self.loggers: list[Any] = []
        self.total, self.count = torch.zeros(()), 0
        self.kept: list[Tensor] = []
        if job.everything:
            self.loggers = [
                TensorBoardLogger(str(job.directory)),
                CSVLogger(str(job.directory / "torchtnt.csv"), steps_before_flushing=10),
            ]

    def train_step(self, state: State, data: dict[str, Tensor]) -> None:
        """A micro-batch."""
        job, label = self.job, data["label"]
        outputs = self.net(data["x"])
        loss = job.loss(outputs, label)
        scalars = {} if job.plain else job.scalars(outputs, label, loss)
        (loss / job.accumulation if job.accumulation > 1 else loss).backward()
        number = self.train_progress.num_steps_completed + 1
        if number % job.accumulation:
            return
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, job.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.loggers and number % 50 == 0:
            found = {"loss": loss.item(), **{name: each.item() for name, each in scalars.items()}}
            for logger in self.loggers:
                logger.log_dict(found, number)

    def eval_step(self, state: State, data: dict[str, Tensor]) -> None:
        """A batch."""
        label = data["label"]
        self.total += self.job.loss(self.net(data["x"]), label) * len(label)
        self.count += len(label)

    def predict_step(self, state: State, data: dict[str, Tensor]) -> None:
        """A batch."""
        self.kept.append(self.net(data["x"]).cpu())


class HooksInTheStep(Callback):
    """Overrides the two hooks of every step and does nothing in them."""

    def on_train_step_start(self, state: State, unit: Any) -> None:
        """Nothing."""

    def on_train_step_end(self, state: State, unit: Any) -> None:
        """Nothing."""


class TorchTNT(Peer):
    """torchtnt."""

    lacks: ClassVar[Mapping[str, str]] = {
        "returned": "the step is one's own: means are summed by hand",
        "cuda": "its step is one's own loop's body",
    }

    def train(self, job: Job) -> None:
        """Train."""
        kind = HooksInTheStep if job.hooks else Callback
        callbacks: list[Any] = [kind() for _ in range(job.callbacks)]
        if job.everything:
            callbacks.append(TQDMProgressBar())
        unit = Unit(job)
        train(unit, job.data, max_epochs=1, callbacks=callbacks)
        for logger in unit.loggers:
            logger.close()

    def evaluate(self, job: Job) -> float:
        """The mean over all samples, summed by one's own step."""
        unit = Unit(job)
        evaluate(unit, job.data)
        return unit.total.item() / unit.count

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        unit = Unit(job)
        predict(unit, job.data)
        return unit.kept


PEER = TorchTNT()
