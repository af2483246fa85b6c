"""What the engine adds to hand-written loops on several processes: `python benchmarks/distributed.py`.

Two processes of this machine (gloo, one thread each) hold a hand-written loop, ours, and under DDP those of
Fabric and Accelerate where they are installed (the other libraries' loops cannot be advanced by a single
step), over the same model, data and optimizer, and make a step of each in turns, so that whatever else
the machine does slows all. The figures are medians over the steps, in rank 0. The models that come out are
compared. The last rows are the start of a script: from the command to its end with `devices=2`, a step
included, beside torchrun with a script that imports torch.

    python benchmarks/distributed.py [--processes 2] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
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
from drivetrain.strategies.deepspeed.library import connect, library, quiet
from drivetrain.strategies.deepspeed.strategy import DeepSpeed
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.distributed import run_distributed
from peers import HAND, OURS, installed
from workloads import GPT_10M, TINY, Batch, Work

WARM_UP = 5


class Task(TaskModule):
    """A task of a work, of which each process takes its part of the batches."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.net = work.model()
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), batch["label"].flatten())

    def configure_optimizers(self) -> Callable[[Any], torch.optim.Optimizer]:
        made: Callable[[Any], torch.optim.Optimizer] = self.work.make_optimizer
        return made


class Weighted(Task):
    """The mean is over tokens that count, a number that differs from batch to batch and rank to rank."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), batch["label"].flatten(), ignore_index=0)

    def loss_weight(self, batch: Batch) -> int:
        return int((batch["label"] != 0).sum())


class Whole(nn.Module):
    """The task's step as a module, which a hand-written loop would wrap."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch."""
        return self.task.loss(self.task(batch["x"]), batch)


def hand_loop(task: Task, batches: list[Batch], strategy: str) -> Iterator[None]:
    """The loop that a user would write by hand."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole: Any = Whole(task)
    if strategy.startswith("zero"):
        yield from deepspeed_loop(whole, batches[rank::world_size], int(strategy.removeprefix("zero")))
        return
    if strategy == "ddp":
        model = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    else:
        for block in getattr(task.net, "blocks", ()):
            fully_shard(block)
        model = fully_shard(whole)
    optimizer = task.work.make_optimizer(model.parameters())
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


def deepspeed_loop(whole: Any, batches: list[Batch], stage: int) -> Iterator[None]:
    """The loop that DeepSpeed's own manual shows."""
    deepspeed = library("cpu")
    connect(deepspeed)
    config = {
        "train_micro_batch_size_per_gpu": whole.task.work.rows,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # left out it is 1.0, and no other contestant clips
    }
    optimizer = whole.task.work.make_optimizer(whole.parameters())
    with quiet():
        model, *_ = deepspeed.initialize(model=whole, optimizer=optimizer, config=config)
    model.train()
    for batch in batches:
        loss = model(batch)
        model.backward(loss)
        model.step()
        yield


def our_loop(task: Task, batches: list[Batch], strategy: str) -> Iterator[Any]:
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


def contestants(case: Case, count: int) -> dict[str, tuple[Task, Iterator[Any]]]:
    """The contestants of a row, each with a task and data of its own, and the loop over them."""
    makers: dict[str, Callable[..., Iterator[Any]]] = {HAND: hand_loop, OURS: our_loop}
    if case.strategy == "ddp" and not case.weighted:
        peers = {"Lightning Fabric": "fabric_loop", "Accelerate": "accelerate_loop"}
        steps = importlib.import_module("peers.stepping")
        makers |= {name: getattr(steps, peers[name]) for name in installed(list(peers)) if name in peers}
    made = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        task = (Weighted if case.weighted else Task)(case.work)
        made[name] = task, make(task, case.work.batches(count, case.work.rows), case.strategy)
    return made


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: What it measures.
        work: What is trained.
        strategy: "ddp", "fsdp" or "zero1" to "zero3".
        steps: How many are timed.
        goal: What is hoped for, as text.
        weighted: Whether the loss is a mean over tokens of which some do not count.
    """

    name: str
    work: Work
    strategy: str
    steps: int
    goal: str = ""
    weighted: bool = False


CASES = [
    Case("DDP, Linear(32, 2)", TINY, "ddp", 3000, "+25 us"),
    Case("FSDP, Linear(32, 2)", TINY, "fsdp", 3000, "+25 us"),
    Case("DDP, GPT of 10M", GPT_10M, "ddp", 40, "1.02"),
    Case("FSDP, GPT of 10M", GPT_10M, "fsdp", 40, "1.02"),
    Case("DDP, GPT of 10M, weighted by tokens", GPT_10M, "ddp", 40, weighted=True),
    Case("ZeRO 1, GPT of 10M", GPT_10M, "zero1", 40, "1.02"),
    Case("ZeRO 2, GPT of 10M", GPT_10M, "zero2", 40, "1.02"),
    Case("ZeRO 3, GPT of 10M", GPT_10M, "zero3", 40, "1.02"),
]


def in_turns(name: str, steps: int) -> dict[str, list[float]]:
    """The seconds of each step, by contestant; in each process. A row goes there by its name."""
    case = next(each for each in CASES if each.name == name)
    made = contestants(case, (WARM_UP + steps + 1) * torch.distributed.get_world_size())
    names = list(made)
    begun = {each: [p.detach().clone() for p in task.parameters()] for each, (task, _) in made.items()}
    spent: dict[str, list[float]] = {each: [] for each in names}
    for step in range(WARM_UP + steps):
        first = step % len(names)
        for which in names[first:] + names[:first]:
            start = perf_counter()
            next(made[which][1])
            spent[which].append(perf_counter() - start)
    same_work({each: moved(task, begun[each]) for each, (task, _) in made.items()})
    return {each: times[WARM_UP:] for each, times in spent.items()}


def moved(task: Task, begun: list[Tensor]) -> float:
    """How far the weights were moved: the norm of the difference. Of ZeRO 3 no process has whole ones: 0.

    Args:
        task: The task, at its end.
        begun: Its weights at the beginning.
    """
    ends: list[Any] = [each.detach() for each in task.parameters()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in ends]
    squares = [
        (end - start).double().square().sum()
        for end, start in zip(whole, begun, strict=True)
        if end.shape == start.shape
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def same_work(distances: dict[str, float]) -> None:
    """Compare how far the contestants have come.

    Raises:
        RuntimeError: One has come farther than the hand-written loop, or less far.
    """
    for name, distance in distances.items():
        if abs(distance - distances[HAND]) > 1e-3 * distances[HAND]:
            raise RuntimeError(
                f"the weights of {name} were moved by {distance}, not {distances[HAND]}: it did other work"
            )


def measure(case: Case, processes: int, steps: int | None = None) -> dict[str, Any]:
    """One row's figures, in microseconds: medians, and of the difference to the hand-written loop."""
    spent = run_distributed(in_turns, case.name, steps or case.steps, world_size=processes, timeout=1800)[0]
    found: dict[str, Any] = {"row": case.name, "goal": case.goal, "contestants": {}}
    hand = spent[HAND]
    for name, times in spent.items():
        differences = [(one - other) * 1e6 for one, other in zip(times, hand, strict=True)]
        found["contestants"][name] = {
            "us": round(statistics.median(times) * 1e6, 1),
            "added_us": round(statistics.median(differences), 1),
            "ratio": round(statistics.median(times) / statistics.median(hand), 3),
        }
    return found


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
    print(f"{'microseconds per step':40}{'':20}{'us':>11}{'added':>9}{'ratio':>8}{'goal':>9}")
    for case in CASES:
        if arguments.only in case.name:
            rows.append(row := measure(case, arguments.processes))
            for name, each in row["contestants"].items():
                figures = f"{each['us']:11.1f}{each['added_us']:+9.1f}{each['ratio']:8.3f}"
                goal = case.goal if name == OURS else ""
                print(f"{case.name:40}{name:20}{figures}{goal:>9}", flush=True)
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
