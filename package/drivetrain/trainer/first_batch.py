"""The first batch of training data, for what looks at a task before a fit."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.core.stages import at_start
from drivetrain.core.types import Batch
from drivetrain.data import Feed, Transfer, as_source
from drivetrain.run.settings import RunSettings
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule
from drivetrain.task.without_trace import without_trace
from drivetrain.trainer.assembly import checked_fit_data
from drivetrain.trainer.data_objects import begun


def first_batch(
    settings: RunSettings, task: TaskModule, train_data: Any, validation_data: Any = None
) -> Batch:
    """Return the first batch of the training data in its own order, on the host, without a trace."""
    given = task, train_data, validation_data
    with without_trace(*given), begun("fit", *given):
        data, _ = checked_fit_data(settings, train_data, validation_data)
        source = as_source(
            data,
            "training",
            settings.seed,
            batch_size=at_start(settings.batch_size),
            in_order=True,
            collate=settings.collate,
            task_collate=info_of(task).collate,
        )
        feed = Feed(source, Transfer(torch.device("cpu")), limit=1)
        try:
            return next(feed.windows(0)).micro_batches[0].batch
        finally:
            feed.close()
