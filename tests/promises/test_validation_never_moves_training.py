"""A validation never moves the training: not its weights, its random numbers, its modes or its data."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from tests.promises.example import QUIET, Line, batches, weights
from torch import Tensor, nn

from drivetrain import Trainer


# Has dropout, a batch norm and randomness of Python's; a validation draws from all of them.
class Sensitive(Line):
    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.net.insert(1, nn.BatchNorm1d(8))
        self.modes: set[tuple[str, bool, bool]] = set()

    def training_step(self, batch: Mapping[str, Tensor]) -> Any:
        self.modes.add(("training", self.training, torch.is_grad_enabled()))
        return super().training_step({**batch, "x": batch["x"] * random.random()})

    def validation_step(self, batch: Mapping[str, Tensor]) -> Any:
        self.modes.add(("validation", self.training, torch.is_grad_enabled()))
        torch.rand(3)
        random.random()
        return super().validation_step(batch)


def trained(validation: bool) -> Sensitive:
    torch.manual_seed(0)
    task = Sensitive()
    often = {"validate_every": "1 step"} if validation else {}
    trainer = Trainer(max_epochs=2, strategy="cpu", checkpoint=False, **QUIET, **often)
    trainer.fit(task, batches(16, 4, shuffle=True), batches(6, 3) if validation else None)
    return task


def test_a_run_with_validations_at_every_step_is_bitwise_one_without() -> None:
    without, with_many = trained(False), trained(True)
    assert weights(with_many).equal(weights(without))
    for one, other in zip(with_many.buffers(), without.buffers(), strict=True):
        assert one.equal(other)  # the statistics of the batch norm
    assert with_many.modes == {("training", True, True), ("validation", False, False)}
