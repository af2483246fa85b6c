"""The transformers Trainer, over any module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from peers.base import Peer
from workloads import Job

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.set_verbosity_error()


class Model(nn.Module):
    """What the Trainer asks of a model: the loss comes from its forward."""

    accepts_loss_kwargs = False

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.whole()
        self.job = job
        self.scalars: dict[str, Tensor] = {}

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        """The loss and the outputs."""
        outputs = self.net(x)
        loss = self.job.loss(outputs, label)
        if not self.job.plain:
            self.scalars = self.job.scalars(outputs, label, loss)
        return {"loss": loss, "logits": outputs}


class Made(Trainer):
    """A Trainer over the job's own data; it adds the metric to what is logged."""

    def get_train_dataloader(self) -> Any:
        """The job's data."""
        return self.train_dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The job's data."""
        return self.eval_dataset

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The job's data."""
        return test_dataset

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        """The latest value of each metric, since it keeps no means of its own."""
        scalars = self.model.scalars if isinstance(self.model, Model) else {}
        super().log({**logs, **{name: each.item() for name, each in scalars.items()}}, *arguments, **named)


class HooksInTheStep(TrainerCallback):
    """Overrides the two hooks of every step and does nothing in them."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Nothing."""


def trainer(job: Job) -> Trainer:
    """A Trainer with everything off that is not asked for."""
    model = Model(job)
    loader = job.data if job.loader else DataLoader(job.data, batch_size=None)
    arguments = TrainingArguments(
        output_dir=str(job.directory),
        num_train_epochs=1,
        per_device_train_batch_size=job.work.rows,
        per_device_eval_batch_size=job.work.rows,
        gradient_accumulation_steps=job.accumulation,
        max_grad_norm=job.clip or 0.0,
        lr_scheduler_type="constant",
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bf16",
        save_strategy="no",
        logging_strategy="steps" if job.everything else "no",
        logging_steps=50,
        logging_nan_inf_filter=False,
        report_to=["tensorboard"] if job.everything else [],
        disable_tqdm=not job.everything,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["label"],
    )
    kind = HooksInTheStep if job.hooks else TrainerCallback
    return Made(
        model,
        arguments,
        train_dataset=loader,
        eval_dataset=loader,
        optimizers=(job.optimizer(model.parameters()), None),
        callbacks=[kind() for _ in range(job.callbacks)],
    )


class TransformersTrainer(Peer):
    """The transformers Trainer. It has no CSV logger, and so it writes TensorBoard's files only."""

    lacks: ClassVar[Mapping[str, str]] = {"returned": "it keeps a mean of the loss only"}

    def train(self, job: Job) -> None:
        """Train."""
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(job.directory)
        try:
            trainer(job).train()
        finally:
            del os.environ["TENSORBOARD_LOGGING_DIR"]

    def evaluate(self, job: Job) -> float:
        """The mean over all samples; it gathers the outputs too unless it is told not to."""
        made = trainer(job)
        made.args.prediction_loss_only = True
        return made.evaluate()["eval_loss"]

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs, as one array."""
        return [torch.from_numpy(trainer(job).predict(job.data).predictions)]


PEER = TransformersTrainer()
