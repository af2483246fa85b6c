"""Optimizers that evaluate and save other weights than they train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.strategies.base import Strategy, check_supported
from drivetrain.strategies.precision.base import Precision
from drivetrain.task.optim.state import TRAINED, take_averages


class OptimizerModes:
    """The optimizers of a run that have methods `train` and `eval`, such as those of `schedulefree`.

    They train in steps, and are in evaluation mode during evaluations and saves and once the fit is over. The
    way back is a copy of the trained weights: their own `train` is the inverse of `eval` only up to
    rounding. A checkpoint has that copy beside the weights, so that a resume is bitwise.

    Args:
        optimizers: All optimizers of the run.
        strategy: The strategy.
        precision: The run's precision.

    Raises:
        StrategyError: The strategy keeps weights of its own.
        ConfigError: The optimizers train float32 copies of weights of 16 bits.
    """

    def __init__(self, optimizers: Iterable[Optimizer], strategy: Strategy, precision: Precision) -> None:
        self.optimizers: list[Any] = [each for each in optimizers if has_modes(each)]
        self._trained: dict[nn.Parameter, Tensor] = {}
        if not self.optimizers:
            return
        kind = type(self.optimizers[0]).__name__
        what = f"{kind}, an optimizer with methods train and eval,"
        check_supported(strategy, "averages", what, "Use 'ddp' or 'fsdp', or another optimizer")
        if precision.updates_of_weights != "nearest":
            raise ConfigError(
                f"{what} needs weights of 32 bits, or Precision(updates='nearest'): this precision makes the"
                " steps on float32 copies of the weights, which its eval does not know"
            )

    def evaluate(self) -> None:
        """Put the weights to evaluate and save in the place of the trained ones."""
        if not self._trained:
            self._trained = {weight: weight.detach().clone() for _, weight in self._weights()}
            for optimizer in self.optimizers:
                optimizer.eval()

    @torch.no_grad()
    def train(self) -> None:
        """Go back to the trained weights."""
        for optimizer in self.optimizers:
            optimizer.train()
        for weight, value in self._trained.items():
            weight.copy_(value)
        self._trained = {}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the block with the weights to evaluate and save."""
        was_trained = not self._trained
        self.evaluate()
        try:
            yield
        finally:
            if was_trained:
                self.train()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Run the block, which saves the weights to evaluate, with the trained ones in the states."""
        with self.evaluating():
            for optimizer, weight in self._weights():
                optimizer.state[weight][TRAINED] = self._trained[weight]
            try:
                yield
            finally:
                for optimizer in self.optimizers:
                    take_averages(optimizer)

    def load(self) -> None:
        """Take the trained weights from the states of a checkpoint, if it has them."""
        for optimizer in self.optimizers:
            self._trained |= take_averages(optimizer).get(TRAINED, {})
        self.train()

    def _weights(self) -> Iterator[tuple[Any, nn.Parameter]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    yield optimizer, weight


def has_modes(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has the methods `train` and `eval`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
