"""What a contestant can be asked to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from workloads import Job


class Peer(ABC):
    """A way to train. Whatever a job does not wish for is off: checkpoints, loggers, progress bars, checks.

    Attributes:
        lacks: What it has no part for, and why: "accumulation", "clip", "returned", "everything",
            "callbacks", "hooks", "evaluate", "predict", "cuda". A row that needs it is left out.
        losses_before: How many losses it computes before that of the first batch.
    """

    lacks: ClassVar[Mapping[str, str]] = {}
    losses_before: ClassVar[int] = 0

    @abstractmethod
    def train(self, job: Job) -> None:
        """Train `job.net` on all batches of `job.data`, in their order."""

    def evaluate(self, job: Job) -> float:
        """The mean loss over all samples; the model is in evaluation mode and no gradient is kept."""
        raise NotImplementedError

    def predict(self, job: Job) -> list[Tensor]:
        """The outputs of all batches, on the host."""
        raise NotImplementedError
