"""Small real tasks and their data."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import OptimizerConfig, TaskModule, Trainer

FEATURES = 4
BLOCKS = 3


def quiet(**options: Any) -> Trainer:  # A Trainer that writes and shows nothing unless told to
    silent = {"strategy": "cpu", "checkpoint": False, "loggers": (), "progress_bar": False}
    return Trainer(**{**silent, **options})


def pairs(count: int = 10, batch_size: int = 2, seed: int = 0, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, FEATURES, generator=generator)
    dataset = TensorDataset(features, features.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=batch_size, **options)


class Regression(TaskModule):
    """A line, with dropout when asked for; `optimizer` is what `configure_optimizers` returns."""

    def __init__(self, optimizer: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.line = nn.Linear(FEATURES, 1)
        with torch.no_grad():
            for parameter in self.line.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.dropout = nn.Dropout(dropout)
        self.optimizer = optimizer

    def forward(self, features: Tensor) -> Tensor:
        return self.line(self.dropout(features))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sgd", lr=0.05) if self.optimizer is None else self.optimizer


def variant(**methods: Any) -> type[Regression]:
    return type("Variant", (Regression,), methods)


PADDING = -1
VOCABULARY = 11


class NextToken(TaskModule):  # A bigram model on padded sequences: a mean over the tokens that are no padding
    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.optimizer = optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens[:, :-1].clamp_min(0)))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        targets = batch["tokens"][:, 1:].flatten()
        kept = targets != PADDING
        each = F.cross_entropy(outputs.flatten(0, 1), targets.clamp_min(0), reduction="none")
        # Without a token this is 0 / 0, in the gradient too.
        return (each * kept).sum() / kept.sum()

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["tokens"][:, 1:] != PADDING).sum())

    def configure_optimizers(self) -> Any:
        return self.optimizer


def ragged(count: int = 22, length: int = 9) -> list[dict[str, Tensor]]:
    """Sequences of very different lengths; the fourth is padding alone."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for number in range(count):
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        kept = 0 if number == 3 else int(torch.randint(2, length + 1, (), generator=generator))
        tokens[kept:] = PADDING
        samples.append({"tokens": tokens})
    return samples


class Duel(TaskModule):  # two networks against one another, each with its own optimizer
    def __init__(self, optimizers: Mapping[str, OptimizerConfig] | None = None) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.generator = nn.Linear(2, FEATURES)
        self.discriminator = nn.Linear(FEATURES, 1)
        self.optimizers = optimizers

    def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        fake = self.generator(batch["noise"])
        yield "discriminator", self._judged(batch["real"], 1.0) + self._judged(fake.detach(), 0.0)
        yield "generator", self._judged(fake, 1.0)
        return {"spread": fake.std()}

    def _judged(self, samples: Tensor, truth: float) -> Tensor:
        verdict = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def validation_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self._judged(self.generator(batch["noise"]), 1.0)

    def configure_optimizers(self) -> Mapping[str, OptimizerConfig]:
        return self.optimizers or {
            "discriminator": OptimizerConfig("sgd", lr=0.1),
            "generator": OptimizerConfig("adamw", lr=0.01),
        }


def duels(count: int = 11) -> list[dict[str, Tensor]]:
    """Samples for `Duel`; the noise is data, so that it does not depend on the size of the batches."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(FEATURES + 2, generator=generator).split((FEATURES, 2)) for _ in range(count)]
    return [{"real": real, "noise": noise} for real, noise in drawn]


class Blocks(TaskModule):  # three blocks and a linear head; the batch is a tensor of shape (samples, size)
    def __init__(self, block: Callable[[], nn.Module], size: int, optimizer: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
            self.head = nn.Linear(size, 1)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer
