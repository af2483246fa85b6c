"""drivetrain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from drivetrain import Callback, TaskModule, Trainer
from peers.base import Peer
from workloads import Job


class Task(TaskModule):
    """A job's task."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.net, self.plain = job.net, job.plain
        self.loss_of, self.scalars, self.optimizer_of = job.loss, job.scalars, job.optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Any:
        loss = self.loss_of(outputs, batch["label"])
        if self.plain:
            return loss
        return {"loss": loss, **self.scalars(outputs, batch["label"], loss)}

    def configure_optimizers(self) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
        made: Callable[[Iterable[Any]], torch.optim.Optimizer] = self.optimizer_of
        return made


class HooksInTheStep(Callback):
    """Overrides the two hooks of every step and does nothing in them."""

    def on_step_start(self, run: Any) -> None:
        """Nothing."""

    def on_step_end(self, run: Any) -> None:
        """Nothing."""


def trainer(job: Job, **options: Any) -> Trainer:
    """A Trainer with everything off that is not asked for, and with further options."""
    more: dict[str, Any] = {"checkpoint": False, "loggers": (), "progress_bar": False}
    if job.everything:
        more |= {"loggers": ("tensorboard", "csv"), "progress_bar": True}
        more |= {"run_dir": job.directory, "log_every": 50}
    if job.precision != "32":
        more["precision"] = "bf16-mixed"
    kind = HooksInTheStep if job.hooks else Callback
    more["callbacks"] = [kind() for _ in range(job.callbacks)]
    return Trainer(
        max_epochs=1,
        strategy=job.device,
        max_grad_norm=job.clip,
        gradient_accumulation_steps=job.accumulation,
        compile=job.compiled,
        **{**more, **options},
    )


class Ours(Peer):
    """This project."""

    def train(self, job: Job) -> None:
        """Train."""
        trainer(job).fit(Task(job), job.data)

    def evaluate(self, job: Job) -> float:
        """The mean over all samples."""
        return trainer(job).validate(Task(job), job.data)["validation/loss"]

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs."""
        return list(trainer(job).predict(Task(job), job.data))


PEER = Ours()
