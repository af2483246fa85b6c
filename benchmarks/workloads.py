"""What is trained: models, data, optimizers, and a job, which every contestant is given alike.

A model maps `x` to outputs; a batch is `{"x": ..., "label": ...}`; the loss is a mean cross entropy. The
labels follow from the inputs, so that training lowers the loss, and whoever does other work ends elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

WARM_UP = 60
"""Steps before the first that is timed, for models that are nearly all overhead."""

Batch = dict[str, Tensor]


class Tiny(nn.Module):
    """A `Linear(32, 2)`: a step is nearly all overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class Deep(nn.Module):
    """Many small layers: two parameters each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers - 1))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) / len(self.layers)
        return self.head(x)


class CNN(nn.Module):
    """Two convolutions over images of 28 by 28; 10 classes, 0.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A GPT: ten million parameters unless told otherwise."""

    def __init__(
        self,
        layers: int = 8,
        width: int = 320,
        heads: int = 5,
        tokens: int = 256,
        length: int = 128,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        if tied:
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.positions.weight
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def vectors(count: int, rows: int) -> list[Batch]:
    """Batches for `Tiny` and `Deep`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, rows, 32, generator=generator)
    return [{"x": each, "label": (each.sum(-1) > 0).long()} for each in x]


def images(count: int, rows: int) -> list[Batch]:
    """Batches for `CNN`: the class is where the brightest stripe is."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 10, (count, rows), generator=generator)
    x = torch.randn(count, rows, 1, 28, 28, generator=generator)
    stripes = torch.arange(28).floor_divide(3).clamp(max=9)
    x += 3.0 * (stripes == label[..., None])[:, :, None, :, None]
    return [{"x": a, "label": b} for a, b in zip(x, label, strict=True)]


def tokens(count: int, rows: int, length: int = 128, size: int = 256) -> list[Batch]:
    """Batches for `GPT`: each row counts on from a number of its own."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, size, (count, rows, 1), generator=generator)
    text = (start + torch.arange(length + 1)) % size
    return [{"x": each[:, :-1].contiguous(), "label": each[:, 1:].contiguous()} for each in text]


@dataclass(frozen=True)
class Work:
    """A model, its data and its optimizer.

    Attributes:
        name: What it is called in tables.
        model: Makes the model.
        batches: Makes so many batches of so many rows.
        rows: Of a batch.
        optimizer: "sgd" or "adamw".
        rate: Its learning rate.
        fused: Whether AdamW is torch's fused one.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, int], list[Batch]]
    rows: int
    optimizer: str = "sgd"
    rate: float = 0.01
    fused: bool = True

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer of every contestant."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.rate)
        return torch.optim.AdamW(parameters, lr=self.rate, weight_decay=0.01, fused=self.fused)


TINY = Work("Linear(32, 2)", Tiny, vectors, 8)
GPT_10M = Work("GPT of 10M", GPT, tokens, 2, "adamw", 1e-3)
SMALL_CNN = Work("CNN of 0.1M", CNN, images, 32)


def deep(layers: int) -> Work:
    """A model of twice as many parameters."""
    return Work(f"{layers} layers", lambda: Deep(layers), vectors, 8)


class Rows(Dataset[Batch]):
    """The rows of batches, one by one."""

    def __init__(self, batches: list[Batch]) -> None:
        self.columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


CLOCKS: dict[str, Callable[[], float]] = {"wall": perf_counter, "cpu": process_time}
"""What can be read, by its name on the command line."""


class Ticking(nn.Module):
    """A model that calls a clock, for predictions, which have no loss."""

    def __init__(self, net: nn.Module, clock: Callable[[], None]) -> None:
        super().__init__()
        self.net = net
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock()
        return self.net(x)


class Clock:
    """Notes the time whenever a loss is computed, which every contestant does once for each batch.

    Attributes:
        read: The wall's clock; or the time that this process's threads had on a processor, which a busy
            machine changes less.
    """

    read: ClassVar[Callable[[], float]] = perf_counter

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self) -> None:
        """Note the time."""
        self.times.append(self.read())


def pinned(batches: list[Batch]) -> list[Batch]:
    """Return the same batches in pinned memory, for copies to a GPU that nobody waits for.

    One batch may come several times. Small tensors share one allocation, for each takes a call of the driver.
    """
    each = list({id(batch): batch for batch in batches}.values())
    if each[0]["x"].ndim < 4:
        columns = {name: torch.stack([batch[name] for batch in each]).pin_memory() for name in each[0]}
        found = [{name: column[row] for name, column in columns.items()} for row in range(len(each))]
    else:  # a stack would lose the order of the dimensions in memory
        found = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in each]
    by_id = {id(batch): made for batch, made in zip(each, found, strict=True)}
    return [by_id[id(batch)] for batch in batches]


@dataclass
class Job:
    """What a contestant is given. All fields are wishes: bare is the default.

    Attributes:
        work: What to train.
        steps: How many are timed.
        block: Over how many the time is taken together: what happens every so many steps is in it.
        warm_up: How many come before.
        accumulation: Micro-batches of a step.
        clip: The global norm to clip to.
        loader: Whether the data is a DataLoader over rows instead of batches in memory.
        accuracy: Whether each step computes one metric beside the loss.
        returned: How many more scalars each step computes, whose means are wanted.
        everything: Progress bar, TensorBoard and CSV every 50 steps, of the loss and of the metric.
        callbacks: How many callbacks that override nothing are given.
        hooks: Whether those callbacks override the two hooks of every step and do nothing.
        device: Where: "cpu" or "cuda".
        precision: "32" or "bf16".
        compiled: Whether the model is compiled; ours takes a `CompileConfig` too.
        backend: What compiles it.
        directory: Where files go.
        clock: Called whenever a loss is computed.
    """

    work: Work
    steps: int = 300
    block: int = 50
    warm_up: int = WARM_UP
    accumulation: int = 1
    clip: float | None = None
    loader: bool = False
    accuracy: bool = False
    returned: int = 0
    everything: bool = False
    callbacks: int = 0
    hooks: bool = False
    device: str = "cpu"
    precision: str = "32"
    compiled: Any = False
    backend: str = "inductor"
    directory: Path = Path("runs")
    clock: Callable[[], None] = field(default_factory=Clock)

    def __post_init__(self) -> None:
        """Make the model and the data, so that no contestant's time contains it."""
        torch.manual_seed(0)
        with torch.device(self.device):  # where its random numbers are quick
            self.net = self.work.model()
        self.count = (self.warm_up + self.steps + 1) * self.accumulation
        made = self.work.batches(self.count, self.work.rows)
        if self.device == "cuda":
            made = pinned(made)
        self.data: Any = DataLoader(Rows(made), batch_size=self.work.rows) if self.loader else made
        self.probe = made[0]
        self.plain = not (self.accuracy or self.returned)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer of every contestant."""
        return self.work.make_optimizer(parameters)

    def whole(self) -> Any:
        """The model, compiled as a whole if that is wished for."""
        return torch.compile(self.net, backend=self.backend) if self.compiled else self.net

    def loss(self, outputs: Tensor, label: Tensor) -> Tensor:
        """The loss of a batch; the clock hears of it."""
        self.clock()
        if outputs.ndim > 2:
            outputs, label = outputs.flatten(0, 1), label.flatten()
        return F.cross_entropy(outputs, label)

    def scalars(self, outputs: Tensor, label: Tensor, loss: Tensor) -> dict[str, Tensor]:
        """What a step computes beside its loss."""
        with torch.no_grad():
            found = {f"metric_{i}": loss * i for i in range(self.returned)}
            if self.accuracy:
                found["accuracy"] = (outputs.argmax(-1) == label).float().mean()
        return found

    def blocks(self, times: list[float]) -> list[float]:
        """Seconds of a step, of each block after the warm-up."""
        step = self.block * self.accumulation
        cuts = times[self.warm_up * self.accumulation :: step]
        return [(end - start) / self.block for start, end in pairwise(cuts)]

    def seconds(self) -> float:
        """Seconds of a step in the fastest block: whatever else a machine does only ever adds to it."""
        assert isinstance(self.clock, Clock)
        return min(self.blocks(self.clock.times))

    def probed(self, rows: int | None = None) -> float:
        """The model's loss on the first batch, or on its first rows, where the model is."""
        training = self.net.training  # ours leaves a module in evaluation whose owner has put it there
        self.net.eval()
        device = next(self.net.parameters()).device
        x, label = self.probe["x"][:rows].to(device), self.probe["label"][:rows]
        with torch.no_grad():
            outputs = self.net(x).float().cpu()
        self.net.train(training)
        return F.cross_entropy(outputs.flatten(0, -2), label.flatten()).item()
