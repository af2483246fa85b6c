"""Small models of transformers trained by a hand-written loop, by transformers' Trainer and by ours.

    PYTHONPATH=package .venv/bin/python benchmarks/transformers_speed.py [--rounds 9] [--steps 200]

All train the same model on the same batches in memory with torch's AdamW, without clipping, schedules, logs
or evaluation. In each round every Trainer trains once, in another order each time, in one process. After
every 25 steps of a Trainer the hand-written loop trains a model of its own on the same batches, so that a
machine that is slow for a while is slow for both. The added time is the median difference of the two. Starts
are measured in an interpreter each. The clock is the time on a processor, which other programs of a machine
change least; `--clock wall` takes the wall's. Prints tables in Markdown.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cached_property
from itertools import groupby
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

_IMPORTED = process_time()

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integrations.transformers.families import model, padded, rows  # noqa: E402

MODELS = {"head": "BERT's head alone", "bert, classes": "BERT", "gpt2": "GPT-2", "t5": "T5"}
HEAD = "head"
WARM_UP, BLOCK = 50, 25
CLOCKS = {"cpu": process_time, "wall": perf_counter}
RATE = 1e-3


class Head(transformers.BertForSequenceClassification):
    """A BERT without its layers: a step is nearly all overhead."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = None

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Classify by the number of the first word."""
        logits = self.classifier(input_ids[:, :1].float().expand(-1, self.config.hidden_size) / 100)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def head() -> Any:
    """The head with the weights that a tiny BERT has."""
    config = model("bert, classes").config
    torch.manual_seed(0)
    return Head(config)


class Job:
    """A model, its batches, and the times at which its forward began."""

    def __init__(
        self,
        family: str,
        steps: int,
        folder: Path,
        read: Callable[[], Any],
        make: Callable[[], Any] | None = None,
        by_hand: Job | None = None,
    ) -> None:
        self.folder, self.read, self.by_hand = folder, read, by_hand
        if family == HEAD:
            family, make = "bert, classes", head
        self.net = model(family) if make is None else make()
        samples = rows(family, 8)
        self.batches = [padded(samples[n % 4 : n % 4 + 4]) for n in range(steps + 1)]
        self.times: list[Any] = []
        self.begun = 0
        self.net.register_forward_pre_hook(self.begin)

    def begin(self, *_: Any) -> None:
        """Note that a step begins; first the hand-written loop trains the other job on the last block."""
        if self.by_hand is not None and self.begun and self.begun % BLOCK == 0:
            self.times.append(None)
            self.by_hand.train(slice(self.begun - BLOCK, self.begun))
            self.by_hand.times.append(None)
        self.begun += 1
        self.times.append(self.read())

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer of every contestant."""
        return torch.optim.AdamW(parameters, lr=RATE)

    @cached_property
    def by_hand_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the hand-written loop."""
        return self.optimizer(self.net.parameters())

    def train(self, part: slice = slice(None)) -> None:
        """The loop that a user would write."""
        net, optimizer = self.net.train(), self.by_hand_optimizer
        for batch in self.batches[part]:
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def blocks(self) -> list[tuple[float, float]]:
        """Microseconds of a step of this job, and of the hand-written loop right after, by block."""
        assert self.by_hand is not None
        both = (microseconds(job.times) for job in (self, self.by_hand))
        return list(zip(*both, strict=True))[WARM_UP // BLOCK :]

    def outcome(self) -> float:
        """The trained model's loss on the first batch."""
        with torch.no_grad():
            return float(self.net.eval()(**self.batches[0]).loss)


def microseconds(times: list[Any]) -> list[float]:
    """Microseconds of a step, by block; None in the times ends one."""
    blocks = [list(block) for ended, block in groupby(times, lambda each: each is None) if not ended]
    return [1e6 * (each[-1] - each[0]) / (len(each) - 1) for each in blocks if len(each) == BLOCK]


def hand(job: Job, saves: int | None) -> None:
    """The hand-written loop by itself."""
    job.train()


def ours(job: Job, saves: int | None, asynchronous: bool = False) -> None:
    """TransformersTask with our Trainer."""
    from drivetrain import CheckpointConfig, Trainer
    from drivetrain.integrations.transformers import TransformersTask

    saving = {"checkpoint": False} if saves is None else {"run_dir": job.folder}
    if saves is not None:
        saving["checkpoint"] = CheckpointConfig(
            every=f"{saves} steps", keep_last=1, asynchronous=asynchronous
        )
    task = TransformersTask(job.net, optimizer=job.optimizer)
    Trainer(max_epochs=1, strategy="cpu", loggers=(), progress_bar=False, **saving).fit(task, job.batches)


class Synced(transformers.TrainerCallback):
    """Makes each checkpoint of transformers' Trainer durable, as ours is when `save` returns."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Sync every file, and every directory after what it holds."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        for path in [*folder.rglob("*"), folder, folder.parent]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def theirs(job: Job, saves: int | None, module: Any = transformers, callbacks: Any = ()) -> None:
    """transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        output_dir=str(job.folder / "theirs"), num_train_epochs=1, max_grad_norm=0.0, use_cpu=True,
        lr_scheduler_type="constant", save_strategy="no" if saves is None else "steps",
        save_steps=saves or 500, save_total_limit=1, logging_strategy="no", logging_nan_inf_filter=False,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, remove_unused_columns=False,
    )  # fmt: skip

    class Made(module.Trainer):
        """A Trainer over the job's own batches."""

        def get_train_dataloader(self) -> Any:
            """The batches."""
            return self.train_dataset

    optimizer = job.optimizer(job.net.parameters())
    loader = DataLoader(job.batches, batch_size=None)
    Made(
        job.net, arguments, train_dataset=loader, optimizers=(optimizer, None), callbacks=[*callbacks]
    ).train()


CONTESTANTS = {"hand-written": hand, "TransformersTask": ours, "transformers Trainer": theirs}


def steps_table(options: argparse.Namespace) -> None:
    """Print the time of a step and the loss at the end."""
    columns = ["model", "contestant", "us of a step", "steps a second", "added us", "ratio", "last loss"]
    print(f"| {' | '.join(columns)} |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    trainers = {name: run for name, run in CONTESTANTS.items() if run is not hand}
    for family, title in MODELS.items():
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
        ends = {}
        for number in range(options.rounds):
            for name in random.Random(number).sample(list(trainers), len(trainers)):
                job, by_hand = turn(name, family, options)
                spent[name] += job.blocks()
                ends[name], ends["hand-written"] = job.outcome(), by_hand.outcome()
        spent["hand-written"] = [(by_hand, by_hand) for each in spent.values() for _, by_hand in each]
        for name in CONTESTANTS:
            added = statistics.median(one - other for one, other in spent[name])
            ratio = statistics.median(one / other for one, other in spent[name])
            middle = statistics.median(one for one, _ in spent[name])
            figures = f"{middle:,.0f} | {1e6 / middle:,.0f} | {added:+.0f} | {ratio:.3f} | {ends[name]:.6f}"
            print(f"| {title} | {name} | {figures} |", flush=True)


def turn(name: str, family: str, options: argparse.Namespace) -> tuple[Job, Job]:
    """Let a Trainer train, and the hand-written loop beside it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        common = (family, options.steps + WARM_UP, Path(folder), CLOCKS[options.clock])
        by_hand = Job(*common)
        job = Job(*common, by_hand=by_hand)
        gc.collect()
        with redirect_stdout(io.StringIO()):  # transformers prints its figures
            CONTESTANTS[name](job, None)
            by_hand.train(slice((job.begun - 1) // BLOCK * BLOCK, None))
    return job, by_hand


def large() -> Any:
    """A BERT of 30 million parameters: a checkpoint of 0.36 GB."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=8000, **sizes))


def saves_table(options: argparse.Namespace) -> None:
    """Print what a checkpoint costs on the wall's clock, and what of it on the processor.

    It is the time of some steps with a checkpoint among them less that of as many steps right after them,
    so that what a checkpoint in the background takes from later steps counts too, and so that a machine
    that is slow for a while changes both. Of all checkpoints it is the median.
    """
    print("\n| model | contestant | ms of a checkpoint | ms of the processor |\n| --- | --- | ---: | ---: |")
    for title, make, rounds in (("BERT", None, options.rounds), ("BERT of 30M", large, options.rounds // 2)):
        saves, between = (40, 10) if make is None else (7, 6)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in SAVING}
        for number in range(max(3, rounds)):
            for name in random.Random(number).sample(list(found), len(found)):
                found[name] += costs(name, make, saves * between, between)
        for name, each in found.items():
            wall, processor = (1e3 * statistics.median(times) for times in zip(*each, strict=True))
            print(f"| {title} | {name} | {wall:.1f} | {processor:.1f} |", flush=True)


SAVING: dict[str, Callable[[Job, int | None], None]] = {
    "TransformersTask": ours,
    "TransformersTask, in the background": lambda job, saves: ours(job, saves, asynchronous=True),
    "transformers' Trainer": theirs,
    "transformers' Trainer, its files synced": lambda job, saves: theirs(job, saves, callbacks=[Synced()]),
}


def costs(name: str, make: Callable[[], Any] | None, steps: int, between: int) -> list[tuple[float, float]]:
    """Return the seconds of each checkpoint on the wall's clock and on the processor."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job("bert, classes", steps, Path(folder), lambda: (perf_counter(), process_time()), make)
        gc.collect()
        with redirect_stdout(io.StringIO()):
            SAVING[name](job, between)
    # From the second checkpoint on: the first one makes what later ones reuse.
    cuts = job.times[2 * between - 1 :: between // 2]
    triples = zip(cuts[::2], cuts[1::2], cuts[2::2], strict=False)
    return [
        (2 * middle[0] - first[0] - last[0], 2 * middle[1] - first[1] - last[1])
        for first, middle, last in triples
    ]


def resident() -> float:
    """MiB that this process holds."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(each for each in lines if each.startswith("VmRSS")).split()[1]) / 1024


def first_step(name: str, clock: str) -> None:
    """Train until the first step is made, print the seconds and the memory, and end."""
    read = process_time if clock == "cpu" else perf_counter

    class First(Job):
        """Ends the process when the second forward begins."""

    with tempfile.TemporaryDirectory() as folder:
        job = First("bert, classes", 3, Path(folder), read)

        def ended(*_: Any) -> None:
            if len(job.times) == 2:
                found = {"seconds": job.times[1] - _IMPORTED, "memory": resident()}
                print(json.dumps(found), file=sys.__stdout__, flush=True)
                os._exit(0)

        job.net.register_forward_pre_hook(ended)
        CONTESTANTS[name](job, None)


def starts_table(options: argparse.Namespace) -> None:
    """Print the time to the first step, after torch and transformers are imported, and the memory then."""
    print("\n| contestant | s from the imports of torch and transformers to the first step | MiB then |")
    print("| --- | ---: | ---: |")
    for name in CONTESTANTS:
        found = []
        for _ in range(3):
            command = [sys.executable, __file__, "--first", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
        print(f"| {name} | {middle['seconds']:.2f} | {middle['memory']:.0f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns of each contestant (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=200, help="timed in a turn (default: %(default)s)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--first", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    if options.first:
        first_step(options.first, "cpu")
        return
    load = os.getloadavg()[0]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {options.clock} time")
    print(f"load of the machine: {load:.1f}\n")
    steps_table(options)
    saves_table(options)
    starts_table(options)


if __name__ == "__main__":
    main()
