"""One table: how often the host waits for the device in a steady step of each configuration, and why.

Without a GPU the operations that would wait are counted, and with one torch's own warnings: both must agree.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.tasks import Duel, duels
from tests.testing.host_reads import HostReads, no_host_reads
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import Engine, OptimizerConfig, TaskModule, callbacks

STEPS = 4


class Language(TaskModule):  # A model of tokens with a norm and dropout
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = nn.Dropout(0.1)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.norm(self.dropout(self.embedding(input_ids))))

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01, schedule="cosine")


class Tokens(Language):  # weighted by its tokens, on the batch's device
    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["labels"] > 2).sum()


class Rated(Language):  # with a declared metric
    def metrics(self) -> Mapping[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        return {"accuracy": MulticlassAccuracy(11)}

    def metric_inputs(self, outputs: Tensor, batch: Any) -> Any:
        return outputs.flatten(0, 1), batch["labels"].flatten()


class WithLoss(Language):  # for an own loop: the loss is in the forward, which wrappers of several ranks need
    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.loss(super().forward(batch["input_ids"]), batch)


def batches(count: int = 40, device: str = "cpu") -> list[dict[str, Tensor]]:
    tokens = torch.randint(11, (count, 2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones(2, 8, device=device)  # NonFiniteDetector checks batches of floating-point numbers alone
    source = torch.arange(2, device=device)
    return [{"input_ids": each, "labels": each, "mask": mask, "source": source} for each in tokens]


class Row(NamedTuple):
    """A Trainer's options, and the waits of a step with their reason."""

    options: Mapping[str, Any] = {}
    waits: int = 0
    reason: str = ""
    task: Callable[[], TaskModule] = Language
    on_device: bool = False
    steps: int = STEPS
    on_cuda: int | None = None


_EVERY_4 = {"gradient_accumulation_steps": 4}
_SCALE = "whether the gradients of an optimizer overflow decides about the schedule and the random streams"
_DECIDES = "whether the loss is a number, or a spike, decides whether the step is made"
ONE_RANK = {
    "bare": Row(),
    "clipped by norm": Row({"max_grad_norm": 0.1}),
    "clipped by value": Row({"max_grad_value": 0.1}),
    "bf16-mixed": Row({"precision": "bf16-mixed"}),
    "bf16-true": Row({"precision": "bf16-true"}),
    "16-mixed": Row({"precision": "16-mixed"}, 1, _SCALE),
    "16-mixed, two optimizers": Row({"precision": "16-mixed"}, 2, _SCALE, task=Duel),
    "accumulation": Row({**_EVERY_4, "max_grad_norm": 0.1}),
    "accumulation, weights on the host": Row(_EVERY_4, task=Tokens),
    "accumulation, weights on the device": Row(_EVERY_4, task=Tokens, on_device=True),
    "micro_batch": Row({"micro_batch": 1}),
    'on_nonfinite="skip"': Row({"on_nonfinite": "skip"}, 1, _DECIDES),
    "declared metrics": Row(
        {}, 1, "torchmetrics counts classes by bincount, for each micro-batch", task=Rated, on_cuda=4
    ),
    "loggers": Row({"loggers": ("csv", "jsonl")}),
    "no log point in 200 steps": Row({}, steps=200),
}
"""On one device, in a fit."""

# Functions, because each run needs a callback of its own.
CHANGE: dict[str, Callable[[], callbacks.Callback]] = {
    "EMA": callbacks.WeightAverage,
    "SWA": lambda: callbacks.WeightAverage("swa", every="1 step"),
    "Freeze": lambda: callbacks.Freeze("embedding"),
    "Freeze until": lambda: callbacks.Freeze({"embedding": "4 steps", "norm": "6 steps"}),
    "SequenceLength": lambda: callbacks.SequenceLength({0: 4, "5 steps": 6}, ("input_ids", "labels", "mask")),
}
WATCH: dict[str, Callable[[], callbacks.Callback]] = {
    "table": lambda: callbacks.Profile(kinds="table"),
    "trace": lambda: callbacks.Profile({"wait": 12, "warmup": 1, "active": 1}),
    "GradientNorms": lambda: callbacks.GradientNorms(per_layer=True),
    "DeviceStats": callbacks.DeviceStats,
    "EarlyStopping": lambda: callbacks.EarlyStopping("train/loss", patience=99),
    "LossSpike": lambda: callbacks.LossSpike(window=10, threshold=1e6),
    "NonFiniteDetector": callbacks.NonFiniteDetector,
    "MixtureMonitor": lambda: callbacks.MixtureMonitor({"a": (), "b": ()}, lambda each, _: each.sum((1, 2))),
    "MemoryReport": lambda: callbacks.MemoryReport(show=False),
    "ModelSummary": lambda: callbacks.ModelSummary(),
    "Throughput": callbacks.Throughput,
    "SlowRank": callbacks.SlowRank,
    "LearningRateMonitor": callbacks.LearningRateMonitor,
    "CompileTime": callbacks.CompileTime,
    "ProgressBar": callbacks.ProgressBar,
    "LambdaCallback": lambda: callbacks.LambdaCallback(on_step_end=lambda run: None),
}
"""Callbacks that change numbers, and those that change none."""

_NEEDS = {"declared metrics": ["torchmetrics"], "ProgressBar": ["tqdm"], "DeviceStats": ["psutil"]}
_NEEDS["DeviceStats"] += ["pynvml"] if torch.cuda.is_available() else []
for name, packages in _NEEDS.items():  # a machine with a GPU may lack them
    if not all(map(find_spec, packages)):
        ONE_RANK.pop(name, None)
        WATCH.pop(name, None)

TWO_RANKS = {
    "ddp": Row({**_EVERY_4, "max_grad_norm": 0.1}, task=Tokens),
    "fsdp": Row({**_EVERY_4, "max_grad_norm": 0.1}, task=Tokens),
}
"""On two ranks with batches of their own, by strategy."""


def waits(row: Row, device: str, directory: Path, **more: Any) -> float:
    options = {"strategy": device, "run_dir": directory, **row.options, **more}
    count = row.steps * 4 + 20
    data: Any = batches(count, device if row.on_device else "cpu")
    if row.task is Duel:
        data = DataLoader(duels(count), batch_size=2)
    found = no_host_reads(row.task(), data, steps=row.steps, allowed=math.inf, **options)
    return len(found) / row.steps


def waits_of_own_loop(device: str, weights_on_device: bool = False, ranks: int = 1) -> float:
    """Return how often the host waits in a step of an `Engine` from four weighted backwards."""
    engine, reads = Engine(device, devices=ranks), 0
    model, optimizer = engine.prepare(WithLoss(), lambda params: torch.optim.AdamW(params, lr=1e-3))
    data: Iterator[Any] = iter(engine.prepare_data(batches(ranks * 4 * (2 + STEPS))))
    for step in range(2 + STEPS):
        with HostReads(engine.device) as found:
            for batch in islice(data, 4):
                weight = (batch["labels"] > 2).sum() if weights_on_device else 3.0 + step
                engine.backward(model(batch), weight)
            engine.step(optimizer, max_grad_norm=1.0)
        reads += len(found.reads) if step > 1 else 0
    engine.teardown()
    return reads / STEPS


def wrong(found: Mapping[str, float], rows: Mapping[str, Row], device: str) -> dict[str, float]:
    most = {name: row.on_cuda if device != "cpu" and row.on_cuda else row.waits for name, row in rows.items()}
    return {
        name: each
        for name, each in found.items()
        if not min(rows[name].waits, most[name]) <= each <= most[name]
    }


def markdown() -> str:  # return the table of docs/explanation/the-step.md
    rows = [f"| {name} | {row.waits} | {row.reason} |" for name, row in ONE_RANK.items()]
    return "\n".join(["| a step | waits | why |", "| --- | ---: | --- |", *rows])
