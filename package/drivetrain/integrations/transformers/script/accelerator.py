"""The part of an `Accelerator` that scripts use in the steps of a Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from drivetrain.distributed.processes import local_rank, rank, world_size


class ScriptAccelerator:
    """The `trainer.accelerator` of a script: `backward` for a training step, and facts of this process.

    Args:
        backward: Takes the loss of a training step.
        device: Returns the device of the model.
    """

    def __init__(self, backward: Callable[[Tensor], Tensor], device: Callable[[], torch.device]) -> None:
        self._backward = backward
        self._device = device

    def backward(self, loss: Tensor) -> None:
        """Leave a loss to the engine, which weights it and runs its backward after the step."""
        self._backward(loss)

    def unwrap_model(self, model: Any) -> Any:
        """Return the model, which no strategy replaces."""
        return model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._device()

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return world_size()

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return rank()

    @property
    def local_process_index(self) -> int:
        """This process's number on its machine."""
        return local_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return local_rank() == 0

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trainer.accelerator has no {name!r} here: it has backward, unwrap_model, device, num_processes,"
            " process_index and is_main_process. drivetrain.Engine is for loops of your own"
        )
