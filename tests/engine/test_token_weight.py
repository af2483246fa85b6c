"""Labels that a loss leaves out: the warning of a task without, or with a wrong, `loss_weight`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import OptimizerConfig, TaskModule


class Tagger(TaskModule):
    """Gives each token one of five tags."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def loss(self, outputs: Tensor, batch: Any, **options: Any) -> Tensor:
        labels = batch["labels"] if isinstance(batch, dict) else batch[-1]
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), **options)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


def tagger(**methods: Any) -> Tagger:
    return type("Tagger", (Tagger,), methods)()


COUNTED = {"loss_weight": lambda self, batch: (batch["labels"] != -100).sum()}  # as the warning says
ALL = {"loss_weight": lambda self, batch: batch["labels"].numel()}  # counts the padding too


def batches(ignored: int, as_dict: bool = True) -> list[Any]:
    made = []
    for length in (6, 3):
        tokens = torch.randint(7, (2, length), generator=torch.Generator().manual_seed(length))
        labels = tokens % 5
        labels[0, :ignored] = -100
        made.append({"tokens": tokens, "labels": labels} if as_dict else (tokens, labels))
    return made


@pytest.mark.parametrize(
    ("methods", "as_dict", "message"),
    [
        ({}, True, r"def loss_weight\(self, batch\): return \(batch\['labels'\] != -100\)"),
        ({}, False, r"def loss_weight\(self, batch\): return \(batch\[-1\] != -100\)"),
        (ALL, True, "gives 12 for .* mean over 10 labels"),
    ],
)
def test_ignored_labels_without_the_right_loss_weight_are_warned_of_once(
    methods: Any, as_dict: bool, message: str
) -> None:
    with warned(message) as seen:
        quiet(max_epochs=3).fit(tagger(**methods), batches(2, as_dict))
    assert len(seen) == 1


def test_the_loss_weight_of_the_warning_makes_accumulation_equal_to_the_large_batch() -> None:
    data = batches(2)
    longest = {name: torch.cat([each[name].reshape(-1) for each in data])[None] for name in data[0]}

    def trained(task: TaskModule, given: list[Any]) -> Tensor:
        quiet(max_epochs=1, gradient_accumulation_steps=2).fit(task, given)
        return nn.utils.parameters_to_vector(task.parameters())

    whole = trained(tagger(**COUNTED), [longest])
    assert torch.allclose(trained(tagger(**COUNTED), data), whole, rtol=1e-6, atol=1e-7)
    with warned("loss_weight"):
        assert not torch.allclose(trained(Tagger(), data), whole, rtol=1e-6, atol=1e-7)


def test_nothing_is_warned_of_without_ignored_labels_or_with_a_right_loss_weight() -> None:
    for methods, ignored in (({}, 0), (COUNTED, 2)):
        quiet(max_epochs=1).fit(tagger(**methods), batches(ignored))
