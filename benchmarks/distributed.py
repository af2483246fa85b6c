"""What the engine adds to hand-written loops on several processes: `python benchmarks/distributed.py`.

Two processes of this machine (gloo, one thread each) hold a hand-written loop and ours, over the same model,
data and optimizer, and make an update of each in turns, so that whatever else the machine does slows both.
The figures are medians over the updates, in rank 0. The last rows are the start of a script: from the command
to its end with `devices=2`, an update included, beside torchrun with a script that imports torch.

    python benchmarks/distributed.py [--processes 2] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from drivetrain import DeepSpeedConfig, TaskModule, Trainer
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.deepspeed import DeepSpeed
from drivetrain.strategies.deepspeed_library import connect, library, quiet
from drivetrain.strategies.fsdp import FSDP
from drivetrain.testing.distributed import run_distributed

WARM_UP = 5
LENGTH = 128
"""Tokens in a window."""

Batches = list[dict[str, Tensor]]
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Tiny(TaskModule):
    """A `Linear(32, 2)`: an update is nearly all overhead."""

    optimizer: Optimizers = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    rows = 8

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["label"])

    def configure_optimizers(self) -> Optimizers:
        return self.optimizer

    @classmethod
    def batches(cls, count: int) -> Batches:
        """So many batches."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, cls.rows, 32, generator=generator)
        label = torch.randint(0, 2, (count, cls.rows), generator=generator)
        return [{"x": a, "label": b} for a, b in zip(x, label, strict=True)]


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


class GPT(TaskModule):
    """Ten million parameters; a batch is 2 windows of 128 tokens."""

    optimizer: Optimizers = staticmethod(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    )
    rows = 2

    def __init__(self, layers: int = 8, width: int = 320, heads: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["label"].flatten())

    def configure_optimizers(self) -> Optimizers:
        return self.optimizer

    @classmethod
    def batches(cls, count: int) -> Batches:
        """So many batches."""
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(0, 256, (count, cls.rows, LENGTH + 1), generator=generator)
        return [{"tokens": each[:, :-1], "label": each[:, 1:]} for each in text]


class Weighted(GPT):
    """The mean is over tokens that count, a number that differs from batch to batch and rank to rank."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["label"].flatten(), ignore_index=0)

    def loss_weight(self, batch: dict[str, Tensor]) -> int:
        return int((batch["label"] != 0).sum())


class Whole(nn.Module):
    """The task's step as a module, which a hand-written loop would wrap."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch."""
        inputs = batch["x"] if "x" in batch else batch["tokens"]
        return self.task.loss(self.task(inputs), batch)


def hand_loop(task: Any, batches: Batches, strategy: str) -> Iterator[None]:
    """The loop that a user would write by hand."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole: Any = Whole(task)
    if strategy.startswith("zero"):
        yield from deepspeed_loop(whole, batches[rank::world_size], int(strategy.removeprefix("zero")))
        return
    if strategy == "ddp":
        model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    else:
        for block in getattr(task, "blocks", ()):
            fully_shard(block)
        model = fully_shard(whole)
    optimizer = task.optimizer(model.parameters())
    model.train()
    for batch in batches[rank::world_size]:
        loss = model(batch)
        if isinstance(task, Weighted):
            # Without it the gradient is not that of the mean over all tokens.
            mine = task.loss_weight(batch)
            total = torch.tensor(float(mine))
            torch.distributed.all_reduce(total)
            loss = loss * (mine * world_size / total)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def deepspeed_loop(whole: Any, batches: Batches, stage: int) -> Iterator[None]:
    """The loop that DeepSpeed's own manual shows."""
    deepspeed = library("cpu")
    connect(deepspeed)
    config = {
        "train_micro_batch_size_per_gpu": whole.task.rows,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = whole.task.optimizer(whole.parameters())
    with quiet():
        model, *_ = deepspeed.initialize(model=whole, optimizer=optimizer, config=config)
    model.train()
    for batch in batches:
        loss = model(batch)
        model.backward(loss)
        model.step()
        yield


def our_loop(task: TaskModule, batches: Batches, strategy: str) -> Iterator[Any]:
    """The same in a Trainer, with everything off that the hand-written loop has not."""
    world_size = torch.distributed.get_world_size()
    if strategy.startswith("zero"):
        config = DeepSpeedConfig(stage=int(strategy.removeprefix("zero")))
        made: Any = DeepSpeed(config, world_size=world_size)
    else:
        made = {"ddp": DDP, "fsdp": FSDP}[strategy](world_size=world_size)
    trainer = Trainer(
        max_epochs=1, checkpoint=False, loggers=(), progress_bar=False, strategy=made, devices=world_size
    )
    return iter(trainer.steps(task, batches))


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: What it measures.
        task: The class of its task.
        strategy: "ddp", "fsdp" or "zero1" to "zero3".
        updates: How many are timed.
        goal: What is hoped for, as text.
    """

    name: str
    task: type[Any]
    strategy: str
    updates: int
    goal: str = ""


CASES = [
    Case("DDP, Linear(32, 2)", Tiny, "ddp", 3000, "+25 us"),
    Case("FSDP, Linear(32, 2)", Tiny, "fsdp", 3000, "+25 us"),
    Case("DDP, GPT of 10M", GPT, "ddp", 40, "1.02"),
    Case("FSDP, GPT of 10M", GPT, "fsdp", 40, "1.02"),
    Case("DDP, GPT of 10M, weighted by tokens", Weighted, "ddp", 40),
    Case("ZeRO 1, GPT of 10M", GPT, "zero1", 40, "1.02"),
    Case("ZeRO 2, GPT of 10M", GPT, "zero2", 40, "1.02"),
    Case("ZeRO 3, GPT of 10M", GPT, "zero3", 40, "1.02"),
]


def in_turns(case: Case) -> tuple[list[float], list[float]]:
    """The seconds of each update, hand-written and ours; in each process."""
    total = (WARM_UP + case.updates + 1) * torch.distributed.get_world_size()
    torch.manual_seed(0)
    loops = [
        hand_loop(case.task(), case.task.batches(total), case.strategy),
        our_loop(case.task(), case.task.batches(total), case.strategy),
    ]
    spent: tuple[list[float], list[float]] = ([], [])
    for update in range(WARM_UP + case.updates):
        for which in (0, 1) if update % 2 else (1, 0):
            start = perf_counter()
            next(loops[which])
            spent[which].append(perf_counter() - start)
    return spent[0][WARM_UP:], spent[1][WARM_UP:]


def measure(case: Case, processes: int) -> dict[str, Any]:
    """One row's figures, in microseconds."""
    hand, ours = run_distributed(in_turns, case, world_size=processes, timeout=1800)[0]
    by_hand, by_us = statistics.median(hand) * 1e6, statistics.median(ours) * 1e6
    differences = [(b - a) * 1e6 for a, b in zip(hand, ours, strict=True)]
    return {
        "row": case.name,
        "hand_us": round(by_hand, 1),
        "ours_us": round(by_us, 1),
        "added_us": round(statistics.median(differences), 1),
        "ratio": round(by_us / by_hand, 3),
        "goal": case.goal,
    }


_SCRIPT = """
import torch
from drivetrain import TaskModule, Trainer

class Tiny(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.net(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()

quiet = {"checkpoint": False, "loggers": (), "progress_bar": False}
Trainer(max_steps=1, strategy="STRATEGY", devices=2, **quiet).fit(Tiny(), [{"x": torch.ones(2, 4)}] * 2)
"""


def seconds_of(command: list[str]) -> float:
    """How long a command takes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return perf_counter() - start


def measure_start(strategy: str, rounds: int = 5) -> dict[str, Any]:
    """A script of two processes beside torchrun with an empty one, in turns; in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        empty, train = Path(directory, "empty.py"), Path(directory, "train.py")
        empty.write_text("import torch\n", encoding="utf-8")
        train.write_text(_SCRIPT.replace("STRATEGY", strategy), encoding="utf-8")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(empty)]
        pairs = [(seconds_of(torchrun), seconds_of([sys.executable, str(train)])) for _ in range(rounds)]
    by_torchrun, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "row": f"start of two processes, {strategy}",
        "torchrun_s": round(by_torchrun, 2),
        "ours_s": round(ours, 2),
        "added_s": round(ours - by_torchrun, 2),
        "goal": "+1 s",
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    rows = []
    print(f"{'microseconds per update':40}{'hand':>11}{'ours':>11}{'added':>9}{'ratio':>8}{'goal':>9}")
    for case in CASES:
        if arguments.only in case.name:
            rows.append(row := measure(case, arguments.processes))
            figures = (
                f"{row['hand_us']:11.1f}{row['ours_us']:11.1f}{row['added_us']:+9.1f}{row['ratio']:8.3f}"
            )
            print(f"{case.name:40}{figures}{case.goal:>9}", flush=True)
    for strategy in ("ddp", "fsdp"):
        if arguments.only in f"start of two processes, {strategy}":
            rows.append(row := measure_start(strategy))
            print(
                f"{row['row']}, seconds: torchrun {row['torchrun_s']}, ours {row['ours_s']},"
                f" {row['added_s']:+} (goal {row['goal']})"
            )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
