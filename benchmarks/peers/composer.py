"""Composer, of which no release allows the torch that the others run on: see composer.txt."""

from __future__ import annotations

# ruff: noqa: E402 - what torchvision lacks is there before it is imported
import contextlib
import logging
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

# torchvision's build on PyPI is for CUDA; where its operators cannot be loaded it cannot even be imported.
# None of them is run here.
with contextlib.suppress(RuntimeError):
    OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

warnings.filterwarnings("ignore")

from composer import Callback, ComposerModel, DataSpec, Evaluator, Trainer
from composer.loggers import TensorboardLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from peers.base import Peer
from workloads import Job

logging.getLogger("composer").setLevel(logging.ERROR)


class Model(ComposerModel):
    """A job's task."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.net
        self.job = job
        # Its training metrics are updated in each step and computed in each batch.
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.mean = MeanMetric()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The outputs."""
        return self.net(batch["x"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The loss."""
        return self.job.loss(outputs, batch["label"])

    def eval_forward(self, batch: dict[str, Tensor], outputs: Any = None) -> Tensor:
        """The outputs, in an evaluation."""
        return self(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """What is measured."""
        if is_train:
            return {"accuracy": self.accuracy} if self.job.accuracy else {}
        return {"loss": self.mean}

    def update_metric(self, batch: dict[str, Tensor], outputs: Tensor, metric: Any) -> None:
        """Add a batch."""
        if metric is self.mean or isinstance(metric, MeanMetric):
            metric.update(self.job.loss(outputs, batch["label"]), weight=len(batch["label"]))
        else:
            metric.update(outputs, batch["label"])


class HooksInTheStep(Callback):
    """Overrides the two hooks of every step and does nothing in them."""

    def batch_start(self, state: Any, logger: Any) -> None:
        """Nothing."""

    def batch_end(self, state: Any, logger: Any) -> None:
        """Nothing."""


def specified(job: Job) -> DataSpec:
    """The data; each batch of the loader is one step's, which Composer cuts into micro-batches itself."""
    data: Any = job.data
    if job.accumulation > 1:
        columns = zip(*[iter(data)] * job.accumulation, strict=True)
        data = [
            {name: torch.cat([each[name] for each in window]) for name in window[0]} for window in columns
        ]
    loader = data if job.loader else DataLoader(data, batch_size=None)
    return DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch["label"]))


def trainer(job: Job, **more: Any) -> Trainer:
    """A Trainer with everything off that is not asked for."""
    kind = HooksInTheStep if job.hooks else Callback
    model = Model(job)
    return Trainer(
        model=model,
        device=job.device,
        optimizers=job.optimizer(model.parameters()),
        callbacks=[kind() for _ in range(job.callbacks)],
        loggers=[TensorboardLogger(str(job.directory))] if job.everything else None,
        progress_bar=job.everything,
        console_log_interval="50ba",
        device_train_microbatch_size=job.work.rows,
        seed=0,
        **more,
    )


class ComposerPeer(Peer):
    """Composer. It has no CSV logger, and so it writes TensorBoard's files only."""

    lacks: ClassVar[Mapping[str, str]] = {
        "returned": "its metrics are made from outputs, not returned by the step",
        "predict": "its outputs are kept by a callback of one's own",
        "cuda": "no release of it allows this torch",
    }

    def train(self, job: Job) -> None:
        """Train."""
        algorithms: list[Any] = []
        if job.clip is not None:
            from composer.algorithms import GradientClipping

            algorithms.append(GradientClipping(clipping_type="norm", clipping_threshold=job.clip))
        made = trainer(job, train_dataloader=specified(job), max_duration="1ep", algorithms=algorithms)
        made.fit()
        made.close()

    def evaluate(self, job: Job) -> float:
        """The mean over all samples."""
        made = trainer(job)
        each = Evaluator(label="eval", dataloader=specified(job), device_eval_microbatch_size=job.work.rows)
        made.eval(each)
        found = made.state.eval_metrics["eval"]["loss"].compute().item()
        made.close()
        return found


PEER = ComposerPeer()
