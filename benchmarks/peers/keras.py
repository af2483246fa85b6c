"""Keras on torch: the torch module in its wrapper, one of its optimizers with the same settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from peers.base import Peer
from workloads import Job


class Loss(keras.losses.Loss):
    """The job's loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def __call__(self, label: Tensor, outputs: Tensor, sample_weight: Any = None) -> Tensor:
        """The mean over the batch, without Keras's weighting of it."""
        return self.job.loss(outputs, label)


class HooksInTheStep(keras.callbacks.Callback):
    """Overrides the two hooks of every step and does nothing in them."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Nothing."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing."""


def optimizer(job: Job) -> Any:
    """Its own, with the same settings."""
    named = {
        "learning_rate": job.work.rate,
        "global_clipnorm": job.clip,
        "gradient_accumulation_steps": job.accumulation if job.accumulation > 1 else None,
    }
    if job.work.optimizer == "sgd":
        return keras.optimizers.SGD(**named)
    return keras.optimizers.AdamW(weight_decay=0.01, epsilon=1e-8, **named)


def model(job: Job) -> Any:
    """A compiled model; "compiled" is Keras's word for one that has an optimizer."""
    made = keras.Sequential([keras.layers.TorchModuleWrapper(job.net)])
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")] if job.accuracy else []
    made.compile(optimizer=optimizer(job), loss=Loss(job), metrics=metrics, jit_compile=False)
    return made


def pair(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Rows as a batch; Keras takes batches as (x, y)."""
    batch = default_collate(rows)
    return batch["x"], batch["label"]


def pairs(job: Job) -> DataLoader[Any]:
    """The job's data."""
    if job.loader:
        return DataLoader(job.data.dataset, batch_size=job.work.rows, collate_fn=pair)
    return DataLoader([(batch["x"], batch["label"]) for batch in job.data], batch_size=None)


class KerasPeer(Peer):
    """Keras. Its TensorBoard callback needs TensorFlow, and so it writes a CSV file of epochs only."""

    lacks: ClassVar[Mapping[str, str]] = {
        "returned": "its metrics are made from outputs, not returned by the step",
        "cuda": "it has optimizers of its own",
    }
    losses_before = 1  # one of stand-ins, to learn the shapes

    def train(self, job: Job) -> None:
        """Train."""
        kind = HooksInTheStep if job.hooks else keras.callbacks.Callback
        callbacks: list[Any] = [kind() for _ in range(job.callbacks)]
        if job.everything:
            callbacks.append(keras.callbacks.CSVLogger(str(job.directory / "keras.csv")))
        model(job).fit(pairs(job), epochs=1, verbose=int(job.everything), callbacks=callbacks)

    def evaluate(self, job: Job) -> float:
        """The mean over all samples."""
        return float(model(job).evaluate(pairs(job), verbose=0))

    def predict(self, job: Job) -> list[Tensor]:
        """All outputs, as one array."""
        return [torch.from_numpy(model(job).predict(pairs(job), verbose=0))]


PEER = KerasPeer()
