"""The small tasks that strategies are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from drivetrain.callbacks import Callback
from drivetrain.optim import OptimizerConfig
from drivetrain.task import TaskModule

PADDING = -1
VOCABULARY = 11
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimizerConfig("adamw", lr=0.01, weight_decay=0.01),
    "rmsprop": OptimizerConfig("rmsprop", lr=0.003),
}


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of very different lengths, of which the fourth is padding alone."""

    def __init__(self, count: int = 22, length: int = 9) -> None:
        generator = torch.Generator().manual_seed(5)
        self.samples = []
        for number in range(count):
            tokens = torch.randint(VOCABULARY, (length,), generator=generator)
            kept = 0 if number == 3 else int(torch.randint(2, length + 1, (), generator=generator))
            tokens[kept:] = PADDING
            self.samples.append({"tokens": tokens})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class Tokens(TaskModule):
    """A small model of sequences, whose loss is a mean over the tokens that are no padding."""

    def __init__(self, optimizer: str = "adamw", frozen: bool = False, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
            self.head = nn.Linear(8, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].requires_grad_(False)
        self.optimizer = optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, of shape (batch, length - 1, vocabulary)."""
        logits: Tensor = self.head(self.blocks(self.embedding(tokens[:, :-1].clamp_min(0))))
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over the tokens; 0 / 0 where there is none."""
        targets = batch["tokens"][:, 1:].flatten()
        kept = targets != PADDING
        each = F.cross_entropy(outputs.flatten(0, 1).float(), targets.clamp_min(0), reduction="none")
        return (each * kept).sum() / kept.sum()

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens that are no padding."""
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """The same, to be counted."""
        return int(self.loss_weight(batch))

    def configure_optimizers(self) -> OptimizerConfig:
        """One of three."""
        return OPTIMIZERS[self.optimizer]


class Duel(TaskModule):
    """Two networks against one another, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.generator = nn.Linear(2, 4)
            self.discriminator = nn.Linear(4, 1)

    def training_step(self, batch: Sequence[Tensor]) -> Iterator[Any]:
        """A step of each."""
        real, noise = batch
        fake = self.generator(noise)
        yield "discriminator", self._judged(real, 1.0) + self._judged(fake.detach(), 0.0)
        yield "generator", self._judged(fake, 1.0)

    def _judged(self, samples: Tensor, truth: float) -> Tensor:
        verdict = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, truth))

    def configure_optimizers(self) -> Mapping[str, OptimizerConfig]:
        """Two kinds."""
        return {
            "discriminator": OptimizerConfig("sgd", lr=0.1),
            "generator": OptimizerConfig("adamw", lr=0.01),
        }


class Norms(Callback):
    """What was seen of every update."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.seen: list[tuple[str, int]] = []

    def on_step_end(self, run: Any) -> None:
        """Note the gradient's norm."""
        if run.step.grad_norm is not None:
            self.norms.append(float(run.step.grad_norm))

    def on_log(self, run: Any) -> None:
        """Note what is logged, and when."""
        self.seen += [(f"{name}={value!r}", run.progress.updates) for name, value in run.logged.items()]


class Counted(TaskModule):
    """Gives back which samples it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The numbers of the samples, and a use of the parameters."""
        used: Tensor = x[:, 0] + 0 * self.line(x)[:, 0]
        return used

    def validation_step(self, batch: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Means from which sums can be told."""
        seen = self(batch[0])
        return {"loss": seen.mean(), "square": seen.square().mean()}

    def predict_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The numbers themselves."""
        seen: Tensor = self(batch[0])
        return seen
