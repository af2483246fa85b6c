"""Random programs: each is plain torch's loop to a rounding, and to the bit itself when it is interrupted.

A program is drawn from a seed. The seeds are new each night and are printed; one that fails is run again by
``RANDOM_PROGRAMS=1234,77 make unit TESTS="tests/promises/test_random_programs.py"`` with ``-m nightly``.
"""

import contextlib
import math
import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.promises.example import QUIET
from tests.support.messages import heard
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import (
    CheckpointConfig,
    LambdaCallback,
    OptimizerConfig,
    Run,
    TaskModule,
    Trainer,
    WeightAverage,
)

PROGRAMS = 60
NAMES = {"sgd": "SGD", "adamw": "AdamW", "adam": "Adam", "adagrad": "Adagrad", "rmsprop": "RMSprop"}
NAMES |= {"nadam": "NAdam", "radam": "RAdam", "adamax": "Adamax"}
WORDS, PADDING, CLASSES = 11, -1, 3
SIZES = {
    "mlp": (6,),
    "norms": (6,),
    "images": (1, 5, 5),
    "strided": (6,),
    "frozen": (6,),
    "tied": (7,),
    "recurrent": (7,),
}


def seeds() -> list[int]:
    asked = os.environ.get("RANDOM_PROGRAMS")
    first = time.time_ns() // 1000 % 10**9
    return [int(each) for each in asked.split(",")] if asked else list(range(first, first + PROGRAMS))


class Tied(nn.Module):  # predicts the next word with its embedding as its head
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.body: nn.Module = nn.GRU(4, 4, batch_first=True) if recurrent else nn.LayerNorm(4)
        self.head = nn.Linear(4, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.body(self.embedding(words[:, :-1].clamp_min(0)))
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden)


class Strided(nn.Module):  # a weight that is a part of a larger block of memory
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6)[:, :3])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight[:6] + self.weight[6]


def network(kind: str, dropout: float) -> nn.Module:
    if kind in ("tied", "recurrent"):
        return Tied(kind == "recurrent")
    if kind == "images":
        layers: list[nn.Module] = [
            nn.Conv2d(1, 3, 3, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(27, CLASSES),
        ]
    elif kind == "strided":
        layers = [Strided(), nn.Tanh(), nn.Linear(3, CLASSES)]
    elif kind == "norms":
        layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, CLASSES, bias=False)]
    else:
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)]
    if kind == "frozen":
        layers[0].requires_grad_(False)
    return nn.Sequential(*layers[:-1], nn.Dropout(dropout), layers[-1])


@dataclass(frozen=True)
class Program:  # all that was drawn; its `repr` is what a failure shows
    seed: int
    kind: str
    dropout: float
    samples: int
    batch: int
    data: str
    weighted: bool
    optimizer: tuple[str, dict[str, Any]]
    decay: float
    schedule: str
    warmup: int
    accumulation: int
    clip: dict[str, float]
    average: bool
    epochs: int
    validated: int
    saved: int
    interruptions: tuple[tuple[str, float], ...]

    @classmethod
    def draw(cls, seed: int) -> "Program":
        chance = random.Random(seed)
        kind = chance.choice(list(SIZES))
        optimizers: list[tuple[str, dict[str, Any]]] = [
            ("sgd", {}),
            ("sgd", {"momentum": 0.9, "nesterov": chance.random() < 0.5}),
            ("adamw", {"betas": (0.8, 0.95)}),
            ("adam", {"amsgrad": True}),
            ("adagrad", {}),
            ("rmsprop", {"momentum": 0.5}),
            ("nadam", {}),
            ("radam", {}),
            ("adamax", {}),
        ]
        return cls(
            seed=seed,
            kind=kind,
            dropout=chance.choice((0.0, 0.0, 0.3)),
            samples=chance.randint(6, 23),
            batch=chance.randint(2, 6),
            data=chance.choice(("dataset", "shuffled", "loader", "workers", "batches", "dropping", "stream")),
            weighted=chance.random() < 0.5,
            optimizer=chance.choice(optimizers),
            decay=chance.choice((0.0, 0.1)),
            schedule=chance.choice(("constant", "cosine", "linear")),
            warmup=chance.choice((0, 0, 3)),
            accumulation=chance.randint(1, 3),
            clip=chance.choice(({}, {"max_grad_norm": 0.3}, {"max_grad_value": 0.05})),
            average=chance.random() < 0.4,
            epochs=chance.randint(1, 3),
            validated=chance.randint(1, 4),
            saved=chance.randint(1, 4),
            interruptions=tuple(
                (chance.choice(("raise", "kill", "interrupt")), chance.random())
                for _ in range(chance.randint(1, 2))
            ),
        )


class Guess(TaskModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(program.seed)
            self.net = network(program.kind, program.dropout)
        self.importance: Tensor
        self.register_buffer("importance", torch.tensor([0.5, 1.0, 2.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Sequence[Tensor]) -> Tensor:
        if outputs.ndim == 3:
            return F.cross_entropy(outputs.flatten(0, 1), batch[0][:, 1:].flatten(), ignore_index=PADDING)
        return F.cross_entropy(outputs, batch[-1], self.importance if self.program.weighted else None)

    def loss_weight(self, batch: Sequence[Tensor]) -> Tensor | int:
        if batch[0].ndim == 2 and not batch[0].is_floating_point():
            return (batch[0][:, 1:] != PADDING).sum()
        return self.importance[batch[-1]].sum() if self.program.weighted else len(batch[-1])

    def configure_optimizers(self) -> OptimizerConfig:
        name, options = self.program.optimizer
        return OptimizerConfig(
            name,
            lr=0.05,
            weight_decay=self.program.decay,
            schedule=self.program.schedule,
            warmup_steps=self.program.warmup,
            total_steps=length(self.program) if self.program.data == "stream" else None,
            **options,
        )


def samples(program: Program) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(program.seed)
    x = torch.randn(program.samples, *SIZES[program.kind], generator=chance)
    if program.kind in ("tied", "recurrent"):
        x = torch.randint(WORDS, (program.samples, 7), generator=chance)
        for number, row in enumerate(x):
            row[2 + number % 6 :] = PADDING
    return [(row, torch.tensor(number % CLASSES)) for number, row in enumerate(x)]


class Samples(Dataset[Any]):
    def __init__(self, program: Program) -> None:
        self.rows = samples(program)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        x, label = self.rows[number]
        return x, torch.tensor(number), label


class Stream(IterableDataset[Any]):  # the same samples, without a length
    def __init__(self, program: Program) -> None:
        self.samples = Samples(program)

    def __iter__(self) -> Iterator[Any]:
        yield from (self.samples[number] for number in range(len(self.samples)))


def training_data(program: Program) -> tuple[Any, dict[str, int]]:
    """The data, and the Trainer's batch size where the data has none."""
    if program.data == "dataset":
        return Samples(program), {"batch_size": program.batch}
    if program.data == "batches":
        return list(DataLoader(Samples(program), batch_size=program.batch)), {}
    if program.data == "stream":
        return DataLoader(Stream(program), batch_size=program.batch), {}
    workers = {"num_workers": 1} if program.data == "workers" else {}
    shuffled, dropping = program.data in ("shuffled", "workers"), program.data == "dropping"
    return DataLoader(Samples(program), program.batch, shuffle=shuffled, drop_last=dropping, **workers), {}


def batches_of_an_epoch(program: Program) -> int:
    whole, rest = divmod(program.samples, program.batch)
    return whole if program.data == "dropping" and whole else whole + bool(rest)


def length(program: Program) -> int:
    return program.epochs * math.ceil(batches_of_an_epoch(program) / program.accumulation)


def fit(
    program: Program, run_dir: Path, interruption: tuple[str, float] | None = None
) -> list[list[list[int]]]:
    """Train in `run_dir`, from its newest checkpoint; return the samples of each micro-batch of each step."""
    windows: list[list[list[int]]] = [[]]
    manner, share = interruption or ("", 2.0)
    last = int(share * length(program))  # the number of steps at which the run ends early

    class Noting(Guess):
        def loss(self, outputs: Tensor, batch: Sequence[Tensor]) -> Tensor:
            if self.training:
                windows[-1].append(batch[1].tolist())
            return super().loss(outputs, batch)

    def end(run: Run) -> None:
        windows.append([])
        if run.progress.steps == last:
            if manner == "kill":
                os._exit(9)
            raise KeyboardInterrupt if manner == "interrupt" else RuntimeError("the program's own error")

    data, options = training_data(program)
    callbacks: list[Any] = [LambdaCallback(on_step_end=end)]
    callbacks += [WeightAverage(decay=0.8)] if program.average else []
    Trainer(
        max_epochs=program.epochs,
        strategy="cpu",
        run_dir=run_dir,
        callbacks=callbacks,
        validate_every=f"{program.validated} steps",
        checkpoint=CheckpointConfig(every=f"{program.saved} steps"),
        gradient_accumulation_steps=program.accumulation,
        **options,
        **program.clip,
        **QUIET,
    ).fit(Noting(program), data, DataLoader(Samples(program), 4), resume="auto")
    return windows[:-1]


def by_hand(program: Program, windows: list[list[list[int]]]) -> dict[str, Tensor]:
    """Plain torch's loop over these windows."""
    task, data = Guess(program), Samples(program)
    name, options = program.optimizer
    trained = [each for each in task.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": program.decay},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = vars(torch.optim)[NAMES[name]](groups, lr=0.05, foreach=False, **options)
    average: list[Tensor] = []
    for step, window in enumerate(windows):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * factor(program, step)
        batches = [torch.utils.data.default_collate([data[each] for each in micro]) for micro in window]
        total = sum(float(task.loss_weight(batch)) for batch in batches)
        optimizer.zero_grad()
        for batch in batches:
            (task.loss(task(batch[0]), batch) * (float(task.loss_weight(batch)) / total)).backward()
        if "max_grad_norm" in program.clip:
            nn.utils.clip_grad_norm_(trained, program.clip["max_grad_norm"])
        if "max_grad_value" in program.clip:
            nn.utils.clip_grad_value_(trained, program.clip["max_grad_value"])
        optimizer.step()
        if program.average and average:
            average = [0.8 * old + 0.2 * new.detach() for old, new in zip(average, trained, strict=True)]
        else:
            average = [each.detach().clone() for each in trained]
    if program.average:
        for parameter, value in zip(trained, average, strict=True):
            parameter.data.copy_(value)
    return {name: each.detach() for name, each in task.state_dict().items()}


def factor(program: Program, step: int) -> float:
    if step < program.warmup:
        return (step + 1) / (program.warmup + 1)
    part = (step - program.warmup) / max(1, length(program) - program.warmup)
    return {"constant": 1.0, "linear": 1 - part, "cosine": 0.5 + 0.5 * math.cos(math.pi * part)}[
        program.schedule
    ]


def interrupted(program: Program, run_dir: Path) -> None:
    for manner, share in program.interruptions:
        if manner == "kill":
            process = multiprocessing.get_context("fork").Process(
                target=fit, args=(program, run_dir, (manner, share))
            )
            process.start()
            process.join()
        else:
            with contextlib.suppress(KeyboardInterrupt, RuntimeError):
                fit(program, run_dir, (manner, share))
    fit(program, run_dir)


def check(program: Program, folder: Path) -> None:
    windows = fit(program, folder / "whole")
    assert len(windows) == length(program)
    seen = Counter(each for window in windows for micro in window for each in micro)
    used = batches_of_an_epoch(program) * program.batch if program.data == "dropping" else program.samples
    assert sum(seen.values()) == used * program.epochs
    assert program.data == "dropping" or set(seen.values()) == {program.epochs}, (
        "a sample came twice, or never"
    )
    weights = load_file(folder / "whole" / "model.safetensors")
    if not program.dropout:
        expected = by_hand(program, windows)
        for name, each in weights.items():
            torch.testing.assert_close(
                each, expected[name], rtol=2e-4, atol=2e-5, msg=lambda text, at=name: f"{at}: {text}"
            )
    interrupted(program, folder / "broken")
    found = load_file(folder / "broken" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], found[name])] == [], (
        "a resume changed these"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("lot", range(6))
def test_random_programs_are_plain_torch_and_resume_to_the_bit(lot: int, tmp_path: Path) -> None:
    failed = []
    numbers = seeds()[lot::6]
    print("seeds:", *numbers)
    for seed in numbers:
        program = Program.draw(seed)
        try:
            with heard():  # of a warm-up as long as the run, and of streams that are drawn again
                check(program, tmp_path / str(seed))
        except Exception:
            failed.append(f"{program}\n{traceback.format_exc(limit=-4)}")
    assert not failed, "\n\n".join(failed)
