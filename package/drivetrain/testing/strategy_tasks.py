"""The small tasks that strategies are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from drivetrain.optim import OptimizerConfig
from drivetrain.task import TaskModule
from drivetrain.types import StepOutput

PADDING = -1
VOCABULARY = 11
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimizerConfig("adamw", lr=0.01, weight_decay=0.01),
    "rmsprop": OptimizerConfig("rmsprop", lr=0.003),
}


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of very different lengths, each with its number, of which one is padding alone.

    Args:
        count: How many.
        length: The tokens of each.
        empty: The one that is padding alone; None for none.
    """

    def __init__(self, count: int = 22, length: int = 9, empty: int | None = 3) -> None:
        generator = torch.Generator().manual_seed(5)
        self.samples = []
        for number in range(count):
            tokens = torch.randint(VOCABULARY, (length,), generator=generator)
            kept = 0 if number == empty else int(torch.randint(2, length + 1, (), generator=generator))
            tokens[kept:] = PADDING
            self.samples.append({"tokens": tokens, "index": torch.tensor(number)})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class Tokens(TaskModule):
    """A small model of sequences, whose loss is a mean over the tokens that are no padding.

    Args:
        optimizer: Which of `OPTIMIZERS`.
        frozen: Whether the first block is not trained.
        tied: Whether the head has the embedding's weight.
        dropout: The share of the embedding that is left out in training.
        schedule: Of the rate.
        measured: Whether it declares a metric.
    """

    def __init__(
        self,
        optimizer: str = "adamw",
        frozen: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        schedule: str = "constant",
        measured: bool = False,
    ) -> None:
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
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.optimizer = optimizer
        self.schedule = schedule
        self.measured = measured

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, of shape (batch, length - 1, vocabulary)."""
        embedded = self.dropout(self.embedding(tokens[:, :-1].clamp_min(0)))
        logits: Tensor = self.head(self.blocks(embedded))
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean over the tokens; 0 / 0 where there is none."""
        targets = batch["tokens"][:, 1:].flatten()
        kept = targets != PADDING
        logits = outputs.flatten(0, 1)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        each = F.cross_entropy(logits, targets.clamp_min(0), reduction="none")
        return (each * kept).sum() / kept.sum()

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The number of tokens that are no padding."""
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """The same, to be counted."""
        return int(self.loss_weight(batch))

    def metrics(self) -> Mapping[str, Any]:
        """How likely the tokens are that were right."""
        if not self.measured:
            return {}
        from torchmetrics import MeanMetric

        return {"likelihood": MeanMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor]:
        """The likelihood of every token that is no padding."""
        targets = batch["tokens"][:, 1:]
        each = outputs.float().softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return (each[targets != PADDING],)

    def configure_optimizers(self) -> OptimizerConfig:
        """One of three, at a rate that stays, falls, or falls with an evaluation."""
        config = OPTIMIZERS[self.optimizer]
        if self.schedule == "constant":
            return config
        watched = {"mode": "max", "patience": 1, "factor": 0.5}
        options = watched if self.schedule == "reduce_on_plateau" else {}
        return OptimizerConfig(
            config.name, lr=config.lr, weight_decay=config.weight_decay,
            schedule=self.schedule, schedule_options=options, **config.options,
        )  # fmt: skip

    def parallel_plan(self) -> Mapping[str, Any]:
        """Pairs that are split by columns, then by rows; tied weights by the same dimension."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "embedding": ColwiseParallel(output_layouts=Replicate()),
            "blocks.0.0": ColwiseParallel(),
            "blocks.1.0": RowwiseParallel(),
            "head": RowwiseParallel(input_layouts=Replicate()),
        }


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

    def parallel_plan(self) -> Mapping[str, Any]:
        """Each by itself, as what one gives may be detached from the other."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "generator": ColwiseParallel(output_layouts=Replicate()),
            "discriminator": RowwiseParallel(input_layouts=Replicate()),
        }

    def configure_optimizers(self) -> Mapping[str, OptimizerConfig]:
        """Two kinds."""
        return {
            "discriminator": OptimizerConfig("sgd", lr=0.1),
            "generator": OptimizerConfig("adamw", lr=0.01),
        }


class Counted(TaskModule):
    """Gives back which samples it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The numbers of the samples, and a use of the parameters."""
        used: Tensor = x[:, 0] + 0 * self.line(x)[:, 0]
        return used

    def validation_step(self, batch: Sequence[Tensor]) -> StepOutput:
        """Means from which sums can be told."""
        seen = self(batch[0])
        return StepOutput(seen.mean(), outputs=seen, metrics={"square": seen.square().mean()})

    def metrics(self) -> Mapping[str, Any]:
        """A declared one, which has the sum of what it is shown."""
        from torchmetrics import SumMetric

        return {"sum": SumMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor]:
        """The numbers of the samples."""
        return (outputs,)

    def parallel_plan(self) -> Mapping[str, Any]:
        """The only module."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {"line": ColwiseParallel(output_layouts=Replicate())}

    def predict_step(self, batch: Sequence[Tensor]) -> Tensor:
        """The numbers themselves."""
        seen: Tensor = self(batch[0])
        return seen
