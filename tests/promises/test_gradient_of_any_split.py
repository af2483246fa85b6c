"""One gradient: sum(weight x loss) / sum(weight), however a batch is split."""

from collections.abc import Mapping
from typing import Any

import torch
from tests.promises.example import QUIET, weights
from tests.support.ranks import on_two_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import OptimizerConfig, TaskModule, Trainer

WORDS, PADDING = 7, -1


class Text(TaskModule):  # predicts the next word. A loss is a mean over the words that are not padding
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(WORDS, 5), nn.Linear(5, WORDS))

    def forward(self, words: Tensor) -> Tensor:
        return self.net(words[:, :-1].clamp_min(0))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["words"][:, 1:].flatten(), ignore_index=PADDING)

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["words"][:, 1:] != PADDING).sum()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.5, momentum=0.9)


def texts() -> list[dict[str, Tensor]]:
    words = torch.randint(WORDS, (20, 9), generator=torch.Generator().manual_seed(0))
    for number, row in enumerate(words):
        row[2 + number * 5 % 8 :] = PADDING
    return [{"words": row} for row in words]


def trained(batch_size: int, accumulated: int, **options: Any) -> Tensor:
    task = Text()
    options = {"strategy": "cpu", "checkpoint": False, "max_grad_norm": 0.3, **QUIET, **options}
    trainer = Trainer(max_epochs=2, gradient_accumulation_steps=accumulated, **options)
    trainer.fit(task, DataLoader(texts(), batch_size=batch_size))
    return weights(task)


def by_hand() -> Tensor:  # the same in plain torch: the mean over all words of eight texts, with clipping
    task, data = Text(), torch.stack([each["words"] for each in texts()])
    optimizer = torch.optim.SGD(task.parameters(), lr=0.5, momentum=0.9)
    for batch in (*data.split(8), *data.split(8)):
        optimizer.zero_grad()
        task.loss(task(batch), {"words": batch}).backward()
        nn.utils.clip_grad_norm_(task.parameters(), 0.3)
        optimizer.step()
    return weights(task)


def test_any_split_of_a_batch_gives_the_same_weights() -> None:
    expected = by_hand()
    for batch_size, accumulated in ((8, 1), (1, 8), (4, 2), (2, 4)):
        torch.testing.assert_close(trained(batch_size, accumulated), expected)


def test_two_ranks_with_half_of_each_batch_have_the_same_weights() -> None:
    for found in on_two_ranks(lambda: trained(2, 2, strategy="ddp", devices=2)):
        torch.testing.assert_close(found, by_hand())
