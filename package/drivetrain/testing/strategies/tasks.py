"""Small tasks and data for the checks of strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from drivetrain.core.types import StepOutput
from drivetrain.task.model_info import ModelInfo
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TaskModule

PADDING = -1
VOCABULARY = 11
OPTIMIZERS = {
    "sgd": OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": OptimizerConfig("adamw", lr=0.01, weight_decay=0.01),
    "rmsprop": OptimizerConfig("rmsprop", lr=0.003),
}


class Sequences(Dataset[dict[str, Tensor]]):
    """Padded sequences of very different lengths, each with its index. One is all padding.

    Args:
        empty: The index of the sequence that is all padding, or None.
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
    """A small next-token model. Its loss is a mean over the tokens without padding."""

    def __init__(
        self,
        optimizer: str = "adamw",
        frozen: bool = False,
        tied: bool = False,
        dropout: float = 0.0,
        schedule: str = "constant",
        with_metric: bool = False,
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
        self.with_metric = with_metric

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens, of shape (batch, length - 1, vocabulary)."""
        embedded = self.dropout(self.embedding(tokens[:, :-1].clamp_min(0)))
        logits: Tensor = self.head(self.blocks(embedded))
        return logits

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss over the tokens without padding; NaN if all are padding."""
        targets = batch["tokens"][:, 1:].flatten()
        kept = targets != PADDING
        logits = outputs.flatten(0, 1)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        each = F.cross_entropy(logits, targets.clamp_min(0), reduction="none")
        return (each * kept).sum() / kept.sum()

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of target tokens without padding."""
        return (batch["tokens"][:, 1:] != PADDING).sum()

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Return the same number, as the number of tokens to count."""
        return int(self.loss_weight(batch))

    def metrics(self) -> Mapping[str, Any]:
        if not self.with_metric:
            return {}
        from torchmetrics import MeanMetric

        return {"likelihood": MeanMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor]:
        """Return the likelihood of every target token without padding."""
        targets = batch["tokens"][:, 1:]
        each = outputs.float().softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return (each[targets != PADDING],)

    def configure_optimizers(self) -> OptimizerConfig:
        """Return the optimizer, with a schedule that is constant, a cosine, or driven by an evaluation."""
        config = OPTIMIZERS[self.optimizer]
        if self.schedule == "constant":
            return config
        watched = {"mode": "max", "patience": 1, "factor": 0.5}
        options = watched if self.schedule == "reduce_on_plateau" else {}
        return OptimizerConfig(
            config.name, lr=config.lr, weight_decay=config.weight_decay,
            schedule=self.schedule, schedule_options=options, **config.options,
        )  # fmt: skip

    def model_info(self) -> ModelInfo:
        """Return column-wise and row-wise styles in turn; tied weights are split along one dimension."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return ModelInfo(
            parallel_plan={
                "embedding": ColwiseParallel(output_layouts=Replicate()),
                "blocks.0.0": ColwiseParallel(),
                "blocks.1.0": RowwiseParallel(),
                "head": RowwiseParallel(input_layouts=Replicate()),
            }
        )


class GeneratorAndDiscriminator(TaskModule):
    """A generator and a discriminator, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            self.generator = nn.Linear(2, 4)
            self.discriminator = nn.Linear(4, 1)

    def training_step(self, batch: Sequence[Tensor]) -> Iterator[Any]:
        """Yield the loss of the discriminator, then of the generator."""
        real, noise = batch
        fake = self.generator(noise)
        yield (
            "discriminator",
            self._discriminator_loss(real, 1.0) + self._discriminator_loss(fake.detach(), 0.0),
        )
        yield "generator", self._discriminator_loss(fake, 1.0)

    def _discriminator_loss(self, samples: Tensor, truth: float) -> Tensor:
        logits = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))

    def model_info(self) -> ModelInfo:
        """Return a plan that gathers the output of each network, because the samples may be detached."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return ModelInfo(
            parallel_plan={
                "generator": ColwiseParallel(output_layouts=Replicate()),
                "discriminator": RowwiseParallel(input_layouts=Replicate()),
            }
        )

    def configure_optimizers(self) -> Mapping[str, OptimizerConfig]:
        """Return an optimizer of another kind for each network."""
        return {
            "discriminator": OptimizerConfig("sgd", lr=0.1),
            "generator": OptimizerConfig("adamw", lr=0.01),
        }


class SampleNumbers(TaskModule):
    """Returns the numbers of the samples as outputs, so that a check sees which samples were used."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the numbers of the samples; the parameters are used but add 0."""
        used: Tensor = x[:, 0] + 0 * self.line(x)[:, 0]
        return used

    def validation_step(self, batch: Sequence[Tensor]) -> StepOutput:
        """Return means of the numbers and of their squares."""
        seen = self(batch[0])
        return StepOutput(seen.mean(), outputs=seen, metrics={"square": seen.square().mean()})

    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics import SumMetric

        return {"sum": SumMetric()}

    def metric_inputs(self, outputs: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor]:
        return (outputs,)

    def model_info(self) -> ModelInfo:
        """Return a column-wise plan for the only module."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        return ModelInfo(parallel_plan={"line": ColwiseParallel(output_layouts=Replicate())})

    def predict_step(self, batch: Sequence[Tensor]) -> Tensor:
        seen: Tensor = self(batch[0])
        return seen
