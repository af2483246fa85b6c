"""What the engine adds to a hand-written loop, in microseconds per update: `python benchmarks/overhead.py`.

Every row runs a hand-written loop and ours over the same task (a Linear(32, 2), batches of 8, SGD) in turns
within one process and gives medians over the rounds, so that a machine that gets busier slows both. The
hand-written loop does what the user's task does (forward, loss, the metrics that the task computes, backward,
clipping, step); what it does not do is logging, a progress bar or checks. The goals are printed beside the
figures; this program judges nothing.

    python benchmarks/overhead.py [--rounds 9] [--updates 1500] [--json FILE] [--only TEXT]
    pytest benchmarks --benchmark-only
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, TaskModule, Trainer
from drivetrain.assembly import build_evaluation
from drivetrain.loop import evaluate, predict

WARM_UP = 60

Batches = list[dict[str, Tensor]]


class Tiny(TaskModule):
    """The task; `returned` more scalars are returned by each step."""

    def __init__(self, returned: int = 0, accuracy: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(32, 2)
        self.returned = returned
        self.accuracy = accuracy

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Any:
        loss = F.cross_entropy(outputs, batch["label"])
        if not self.returned and not self.accuracy:
            return loss
        return scalars(self, outputs, batch, loss)

    def configure_optimizers(self) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
        return sgd


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both loops."""
    return torch.optim.SGD(parameters, lr=0.01)


def scalars(task: Tiny, outputs: Tensor, batch: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    """What the task returns besides its loss; computed in both loops."""
    found = {"loss": loss}
    if task.accuracy:
        found["accuracy"] = (outputs.argmax(-1) == batch["label"]).float().mean()
    with torch.no_grad():
        found.update({f"metric_{i}": loss * i for i in range(task.returned)})
    return found


class Samples(Dataset[dict[str, Tensor]]):
    """As many samples as are needed."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 32, generator=generator)
        self.label = torch.randint(0, 2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


def in_memory(count: int) -> Batches:
    """Ready batches in a list."""
    samples = Samples(8 * count)
    return [{"x": samples.x[i : i + 8], "label": samples.label[i : i + 8]} for i in range(0, 8 * count, 8)]


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: What it measures.
        goal: The most that ours may add, in microseconds; None where the row is for comparison.
        hand: Runs the hand-written loop for so many updates (or batches) and gives the seconds of one.
        ours: Runs ours, likewise.
    """

    name: str
    goal: float | None
    hand: Callable[[int], float]
    ours: Callable[[int], float]


def hand_loop(task: Tiny, data: Any, clip: float | None = None, accumulation: int = 1) -> Iterator[None]:
    """The loop that a user would write by hand."""
    optimizer = sgd(task.parameters())
    task.train()
    parameters = list(task.parameters())
    count = 0
    for batch in data:
        outputs = task.net(batch["x"])
        loss = F.cross_entropy(outputs, batch["label"])
        if task.returned or task.accuracy:
            scalars(task, outputs, batch, loss)
        (loss / accumulation if accumulation > 1 else loss).backward()
        count += 1
        if count % accumulation:
            continue
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad()
        yield


def trainer(**arguments: Any) -> Trainer:
    """A Trainer with everything off that is not asked for."""
    bare: dict[str, Any] = {
        "max_epochs": 1,
        "checkpoint": False,
        "loggers": (),
        "progress_bar": False,
        "strategy": "cpu",
    }
    return Trainer(**{**bare, **arguments})


def training(
    name: str,
    goal: float | None,
    make_data: Callable[[int], Any] = in_memory,
    *,
    returned: int = 0,
    accuracy: bool = False,
    clip: float | None = None,
    accumulation: int = 1,
    everything: bool = False,
    callbacks: int = 0,
    kind: type[Callback] = Callback,
) -> Case:
    """A row about training."""

    def hand(updates: int) -> float:
        data = make_data((updates + WARM_UP) * accumulation)
        return seconds_per_update(hand_loop(Tiny(returned, accuracy), data, clip, accumulation), updates)

    def ours(updates: int) -> float:
        more: dict[str, Any] = {}
        if everything:
            more = {
                "loggers": ("tensorboard", "csv"),
                "progress_bar": True,
                "run_dir": tempfile.mkdtemp(prefix="overhead-"),
                "log_every": 50,
            }
        made = trainer(
            max_grad_norm=clip,
            gradient_accumulation_steps=accumulation,
            callbacks=[kind() for _ in range(callbacks)],
            **more,
        )
        steps = made.steps(Tiny(returned, accuracy), make_data((updates + WARM_UP + 1) * accumulation))
        with redirect_stderr(io.StringIO()):
            return seconds_per_update(steps, updates)

    return Case(name, goal, hand, ours)


def loader(updates: int) -> DataLoader[Any]:
    """A DataLoader in this process, shuffling."""
    return DataLoader(Samples(8 * updates), batch_size=8, shuffle=True)


def hand_evaluation(batches: int) -> float:
    """A hand-written evaluation: the mean loss over all samples."""
    data, task = in_memory(batches), Tiny().eval()

    def evaluate_all() -> float:
        total, count = torch.zeros(()), 0
        with torch.no_grad():
            for batch in data:
                total += F.cross_entropy(task.net(batch["x"]), batch["label"]) * len(batch["label"])
                count += len(batch["label"])
        return total.item() / count

    return seconds_of(evaluate_all) / batches


def our_evaluation(batches: int) -> float:
    """The loop behind `Trainer.validate`, without building the run, which the other does not have."""
    run = build_evaluation(trainer(), Tiny(), in_memory(batches), "validation", None)
    return seconds_of(lambda: evaluate(run, "validation", run.evaluation_feeds)) / batches


def hand_prediction(batches: int) -> float:
    """A hand-written prediction: all outputs on the host."""
    data, task = in_memory(batches), Tiny().eval()

    def predict_all() -> list[Tensor]:
        with torch.no_grad():
            return [task.net(batch["x"]).cpu() for batch in data]

    return seconds_of(predict_all) / batches


def our_prediction(batches: int) -> float:
    """The loop behind `Trainer.predict`."""
    run = build_evaluation(trainer(), Tiny(), in_memory(batches), "predict", None)
    return seconds_of(lambda: list(predict(run, run.evaluation_feeds[0][1]))) / batches


class HooksInTheStep(Callback):
    """A callback that overrides the two hooks of every step and does nothing in them."""

    def on_step_start(self, run: Any) -> None:
        """Nothing."""

    def on_step_end(self, run: Any) -> None:
        """Nothing."""


CASES = [
    training("in memory, bare", 10),
    training("DataLoader, bare", 10, loader),
    training("in memory, everything on", 35, accuracy=True, everything=True),
    training("DataLoader, everything on", 35, loader, accuracy=True, everything=True),
    training("clipping", 10, clip=1.0),
    training("accumulation 4", None, accumulation=4),
    training("clipping and accumulation 4", None, clip=1.0, accumulation=4),
    training("1 returned metric", None, returned=1),
    training("10 returned metrics", None, returned=10),
    training("100 returned metrics", 60, returned=100),
    training("0 callbacks", 10),
    training("10 idle callbacks", 12, callbacks=10),
    training("50 idle callbacks", 12, callbacks=50),
    training("50 callbacks, two empty hooks each in the step", None, callbacks=50, kind=HooksInTheStep),
    Case("evaluation, per batch", 5, hand_evaluation, our_evaluation),
    Case("prediction, per batch", None, hand_prediction, our_prediction),
]


def seconds_per_update(steps: Iterator[Any], updates: int) -> float:
    """The time of one update once everything is warm."""
    for _ in range(WARM_UP):
        next(steps)
    start = perf_counter()
    for _ in range(updates):
        next(steps)
    spent = perf_counter() - start
    close = getattr(steps, "close", None)
    if close is not None:
        close()
    return spent / updates


def seconds_of(work: Callable[[], Any]) -> float:
    """The time of one call, after one that warms up."""
    work()
    start = perf_counter()
    work()
    return perf_counter() - start


def import_seconds(statement: str) -> float:
    """The time of an import in a fresh interpreter."""
    program = f"from time import perf_counter as t; s = t(); {statement}; print(t() - s)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(case: Case, rounds: int, updates: int) -> dict[str, Any]:
    """Hand-written and ours in turns; medians and the range of the differences, in microseconds."""
    pairs = [(case.hand(updates) * 1e6, case.ours(updates) * 1e6) for _ in range(rounds)]
    hand, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    differences = sorted(b - a for a, b in pairs)
    return {
        "row": case.name,
        "hand_us": round(hand, 1),
        "ours_us": round(ours, 1),
        "added_us": round(ours - hand, 1),
        "lowest_us": round(differences[0], 1),
        "highest_us": round(differences[-1], 1),
        "goal_us": case.goal,
    }


def measure_imports(rounds: int) -> dict[str, Any]:
    """What importing everything public adds to importing torch, in seconds."""
    names = "from drivetrain import Trainer, TaskModule, OptimizerConfig, Engine"
    pairs = [
        (import_seconds("import torch"), import_seconds(f"import torch; {names}")) for _ in range(rounds)
    ]
    torch_alone, both = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "row": "import, seconds over torch",
        "torch_s": round(torch_alone, 3),
        "added_s": round(both - torch_alone, 3),
        "goal_s": 0.15,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print a table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    print(f"{'microseconds per update':48}{'hand':>9}{'ours':>9}{'added':>9}{'range':>17}{'goal':>8}")
    for case in CASES:
        if arguments.only in case.name:
            row = measure(case, arguments.rounds, arguments.updates)
            rows.append(row)
            spread = f"{row['lowest_us']:+.1f} .. {row['highest_us']:+.1f}"
            goal = "" if case.goal is None else f"{case.goal:+g}"
            figures = f"{row['hand_us']:9.1f}{row['ours_us']:9.1f}{row['added_us']:+9.1f}"
            print(f"{case.name:48}{figures}{spread:>17}{goal:>8}", flush=True)
    if arguments.only in "import":
        rows.append(measure_imports(arguments.rounds))
        print(f"import, seconds over torch's {rows[-1]['torch_s']}: {rows[-1]['added_s']:+.3f} (goal +0.15)")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
