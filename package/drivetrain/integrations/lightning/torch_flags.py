"""Switches of torch that an argument of Lightning's Trainer sets for the length of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from drivetrain.callbacks import Callback

if TYPE_CHECKING:
    from drivetrain.run.run import Run


@final
class TorchFlags(Callback):
    """Sets switches of torch in a run, and restores them after it.

    Args:
        warns: Whether an operation without a deterministic kernel gives a warning.
        benchmark: Whether cuDNN tries its kernels out and takes the fastest; None leaves it as it is.
        anomalies: Whether a NaN in backward is an error that names the operation of the forward.
    """

    def __init__(self, warns: bool, benchmark: bool | None, anomalies: bool) -> None:
        self.warns = warns
        self.benchmark = benchmark
        self.anomalies = anomalies

    @contextmanager
    def wrap_run(self, run: Run) -> Iterator[None]:
        """Set the switches for the block."""
        cudnn = torch.backends.cudnn
        before = torch.are_deterministic_algorithms_enabled()
        warned, tried = torch.is_deterministic_algorithms_warn_only_enabled(), cudnn.benchmark
        try:
            if self.warns:
                torch.use_deterministic_algorithms(True, warn_only=True)
            if self.benchmark is not None:
                cudnn.benchmark = self.benchmark
            with torch.autograd.set_detect_anomaly(self.anomalies or torch.is_anomaly_enabled()):
                yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warned)
            cudnn.benchmark = tried
