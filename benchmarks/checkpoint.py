"""What checkpoints cost, beside other ways to write and read the same bytes.

Every way writes the same tensors (the weights of a GPT and AdamW's state of them), and syncs its files and
their directory before its time ends. In each round all take their turn, in another order each time; each is
divided by the plain write, or read, of that round, because the disk and the machine are not the same from one
minute to the next. Reads find the files in the page cache, all alike. The goals are printed beside the
figures; this program judges nothing.

    python benchmarks/checkpoint.py [--gigabytes 1.2] [--rounds 5] [--directory D ...] [--only TEXT]
                                    [--json FILE]
    pytest benchmarks --benchmark-only
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from checkpoint_sharded import RANKS
from checkpoint_sharded import measure as measure_sharded
from contestants import CONTESTANTS, OURS, PLAIN, Contestant, Groups, gpt_like, size_of
from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DirectoryCheckpointIO, Snapshot
from drivetrain.checkpoint.saving.index import INDEX, Entry, write_index
from drivetrain.checkpoint.saving.run_directory import newest_first
from drivetrain.cli.main import main as command_line
from drivetrain.testing.distributed import run_distributed

LISTED = 1_000

_M_MMAP_THRESHOLD = -3
"""A name of glibc's malloc.h."""


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        table: Which table.
        name: What was measured.
        median: In the table's unit.
        lowest: Of all rounds.
        highest: Of all rounds.
        ratio: To what the table compares with, the median of the rounds' ratios; None without comparison.
        ratios: The lowest and the highest of them.
        goal: What is wanted of ours; a text.
    """

    table: str
    name: str
    median: float
    lowest: float
    highest: float
    ratio: float | None = None
    ratios: tuple[float, float] | None = None
    goal: str = ""

    def __str__(self) -> str:
        """The line as it is printed."""
        figures = f"{self.median:11.4g}{self.lowest:11.4g} .. {self.highest:<9.4g}"
        ratio = "" if self.ratio is None else f"{self.ratio:7.2f}"
        if self.ratios is not None:
            ratio += f" ({self.ratios[0]:.2f} .. {self.ratios[1]:.2f})"
        return f"  {self.name:44}{figures}{ratio:24}{self.goal}".rstrip()


def row(table: str, name: str, values: list[float], goal: str = "") -> Row:
    """A row out of the figures of all rounds."""
    return Row(table, name, statistics.median(values), min(values), max(values), goal=goal)


def compared(made: Row, ratios: list[float]) -> Row:
    """The row with each round's ratio."""
    return replace(made, ratio=statistics.median(ratios), ratios=(min(ratios), max(ratios)))


def seconds(act: Callable[[], object], settle: bool = True) -> float:
    """The time of one call.

    Args:
        act: What is called; what it returns is freed after the time is taken.
        settle: First let the disk end what earlier ones have left it to do.
    """
    gc.collect()
    if settle and hasattr(os, "sync"):
        os.sync()
    start = perf_counter()
    result = act()
    spent = perf_counter() - start
    del result
    return spent


def save_and_load(directory: Path, groups: Groups, rounds: int) -> list[Row]:
    """Throughput of all ways to save and to load, in GB/s."""
    size = size_of(groups) / 1e9
    found: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    for round_ in range(rounds):
        for contestant in random.Random(round_).sample(CONTESTANTS, len(CONTESTANTS)):
            for verb, spent in seconds_of_both(contestant, directory / "c", groups).items():
                found[verb].setdefault(contestant.name, []).append(size / spent)
    rows = []
    for verb, goal in (("save", "at least 0.9"), ("load", "at least 0.8")):
        for contestant in CONTESTANTS:
            rates = found[verb][contestant.name]
            made = row(f"{verb}, GB/s", contestant.name, rates, goal if contestant.name == OURS else "")
            ratios = [rate / plain for rate, plain in zip(rates, found[verb][PLAIN], strict=True)]
            rows.append(compared(made, ratios))
    return rows


def seconds_of_both(contestant: Contestant, path: Path, groups: Groups) -> dict[str, float]:
    """The time of a save and of a load; nothing is left on the disk."""
    times = {
        "save": seconds(lambda: contestant.save(path, groups)),
        "load": seconds(lambda: contestant.load(path, groups)),
    }
    shutil.rmtree(path)
    return times


FRESH, AGAIN = "copy to fresh memory", "copy to the same memory again"


def stall(directory: Path, groups: Groups, rounds: int) -> list[Row]:
    """How long training waits for an asynchronous save, beside a mere copy; seconds."""
    table = "an asynchronous save keeps training waiting, s"
    found: dict[str, list[float]] = {}
    for round_ in range(rounds):
        # By turns, because memory that another has used and given back is faster than memory never used.
        both = (lambda: copies(groups), lambda: saves_behind(directory / "c", groups))
        for act in both if round_ % 2 else both[::-1]:
            for name, spent in act().items():
                found.setdefault(name, []).append(spent)
    rows = [row(table, name, found[name]) for name in (FRESH, AGAIN)]
    for name in ("first save", "second save", "third save"):
        copy = found[FRESH if name == "first save" else AGAIN]
        ratios = [spent / other for spent, other in zip(found[name], copy, strict=True)]
        rows.append(compared(row(table, name, found[name], "at most 1.2"), ratios))
    return rows


def copies(groups: Groups) -> dict[str, float]:
    """The time of a copy of everything, and of another into the same memory."""
    tensors = [tensor for named in groups.values() for tensor in named.values()]
    kept: list[Tensor] = []
    return {
        FRESH: seconds(lambda: kept.extend(tensor.clone() for tensor in tensors)),
        AGAIN: seconds(lambda: copy_into(kept, tensors)),
    }


def saves_behind(path: Path, groups: Groups) -> dict[str, float]:
    """The time until an asynchronous save returns, for the first three of a run."""
    manager = CheckpointManager(str(path), CheckpointConfig(best=0, asynchronous=True))
    found = {}
    for step, name in enumerate(("first save", "second save", "third save"), start=1):
        found[name] = seconds(lambda step=step: manager.save(step, 0, {}, lambda: Snapshot(dict(groups))))
        manager.wait()
    shutil.rmtree(path)
    return found


def copy_into(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor to memory that is there already."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def slowdown(directory: Path, groups: Groups, rounds: int) -> list[Row]:
    """Matrix products per second on one thread, while nothing and while a checkpoint is written behind."""
    matrix = torch.randn(512, 512)
    manager = CheckpointManager(str(directory / "c"), CheckpointConfig(best=0, asynchronous=True))
    alone, behind = [], []

    def rate(busy: Callable[[], bool]) -> float:
        start, count = perf_counter(), 0
        while busy():
            matrix @ matrix
            count += 1
        return count / (perf_counter() - start)

    for step in range(rounds):
        until = perf_counter() + 0.5
        alone.append(rate(lambda until=until: perf_counter() < until))
        manager.save(step, 0, {}, lambda: Snapshot(dict(groups)))
        behind.append(rate(lambda: manager.poll() is None))
    table = "training meanwhile, products per second"
    ratios = [one / other for one, other in zip(behind, alone, strict=True)]
    return [
        row(table, "nothing is written", alone),
        compared(row(table, "while one is written", behind), ratios),
    ]


def listing(directory: Path, rounds: int) -> Iterator[Row]:
    """Finding out what is in a directory of many small checkpoints; seconds."""
    names = [f"step-{number:08d}" for number in range(1, LISTED + 1)]
    io_ = DirectoryCheckpointIO()
    io_.save(
        str(directory / names[0]), Snapshot({"model": {"w": torch.ones(3)}}, {}, {"steps": 1, "epoch": 0})
    )
    for name in names[1:]:
        shutil.copytree(directory / names[0], directory / name)
    write_index(
        str(directory), [Entry(name, number, number, 0) for number, name in enumerate(names, start=1)]
    )
    text = str(directory)

    def command() -> None:
        with redirect_stdout(io.StringIO()) as printed:
            if command_line(["checkpoint", "list", text]) or names[-1] not in printed.getvalue():
                raise RuntimeError("`drivetrain checkpoint list` failed")

    actions: dict[str, Callable[[], object]] = {
        "DirectoryCheckpointIO.list": lambda: io_.list(text),
        "CheckpointManager.entries": lambda: CheckpointManager(text, CheckpointConfig(best=0)).entries(),
        "newest first": lambda: newest_first(text),
        "drivetrain checkpoint list": command,
    }
    table = f"listing {LISTED} checkpoints, s"
    for name, act in actions.items():
        yield row(table, name, [seconds(act, settle=False) for _ in range(rounds)], "under 0.2")
    os.remove(directory / INDEX)
    without = [seconds(lambda: newest_first(text), settle=False) for _ in range(rounds)]
    yield row(table, "newest first, the index lost", without)


def memory(directory: Path, gigabytes: float, groups: Groups) -> list[Row]:
    """The peak above what was held before, each in a process of its own; MiB."""
    largest = max(tensor.nbytes for named in groups.values() for tensor in named.values())
    goals = {
        "save": f"at most {max(largest, 64 << 20) / 2**20:.4g}",
        "asynchronous": f"at most {1.1 * size_of(groups) / 2**20:.4g}",
    }
    if not Path("/proc/self/clear_refs").exists():
        return []
    program = str(Path(__file__).with_name("checkpoint_memory.py"))

    def peak(what: str, name: str) -> Row:
        command = [sys.executable, program, what, name, str(directory / "c"), str(gigabytes)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        goal = goals.get(what, "") if name == OURS else ""
        return row(table, f"{what}, {name}", [int(done.stdout) / 2**20], goal)

    table = "peak of additional memory, MiB"
    rows = []
    for contestant in CONTESTANTS:
        rows += [peak("save", contestant.name), peak("load", contestant.name)]
        shutil.rmtree(directory / "c")
    return [*rows, peak("asynchronous", OURS)]


def sharded(directory: Path, gigabytes: float, rounds: int) -> list[Row]:
    """Two processes, each with a half of every tensor; seconds, of the one that took longer."""
    table = f"{RANKS} processes, sharded, s"
    each = run_distributed(
        measure_sharded, str(directory), gigabytes, rounds, world_size=RANKS, timeout=600.0
    )
    slowest = {
        name: [max(times) for times in zip(*(rank[name] for rank in each), strict=True)] for name in each[0]
    }
    rows = []
    for name, times in slowest.items():
        other = slowest[f"torch.distributed.checkpoint, {name.rpartition(', ')[2]}"]
        made = row(table, name, times)
        ratios = [spent / theirs for spent, theirs in zip(times, other, strict=True)]
        rows.append(compared(made, ratios) if name.startswith(OURS) else made)
    return rows


def always_fresh_memory() -> None:
    """Give every large tensor memory straight from the system, where the C library can be told to.

    Otherwise some loads get what another has given back, which is twice as fast and a matter of luck. A run
    loads once, at its start, into memory that nobody has used.
    """
    mallopt = None if os.name == "nt" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 17)


@contextmanager
def scratch(parent: str) -> Iterator[Path]:
    """A directory of our own inside one that was named."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=parent) as made:
        yield Path(made)


def measure(parent: str, gigabytes: float, rounds: int, only: str) -> Iterator[Row]:
    """All tables for one disk."""
    groups = gpt_like(gigabytes)
    tables: dict[str, Callable[[Path], Iterable[Row]]] = {
        # First, while this process is small: it is copied.
        "sharded": lambda path: sharded(path, gigabytes, rounds),
        "throughput": lambda path: save_and_load(path, groups, rounds),
        "stall": lambda path: stall(path, groups, rounds),
        "slowdown": lambda path: slowdown(path, groups, rounds),
        "memory": lambda path: memory(path, gigabytes, groups),
        "listing": lambda path: listing(path, rounds),
    }
    for name, table in tables.items():
        if only in name:
            with scratch(parent) as directory:
                yield from table(directory)


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write them as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory", nargs="+", default=[tempfile.gettempdir()], help="on the disks to measure"
    )
    parser.add_argument("--only", default="", help="sharded, throughput, stall, slowdown, memory or listing")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    always_fresh_memory()
    warnings.simplefilter("ignore")  # torch.distributed.checkpoint says that it is alone
    rows: dict[str, list[dict[str, Any]]] = {}
    for parent in arguments.directory:
        table = ""
        print(f"{parent}: {arguments.gigabytes:g} GB, {arguments.rounds} rounds")
        for made in measure(parent, arguments.gigabytes, arguments.rounds, arguments.only):
            if made.table != table:
                table = made.table
                print(f"\n  {table:44}{'median':>11}{'range':>17}{'ratio':>16}{'goal':>14}")
            print(made, flush=True)
            rows.setdefault(parent, []).append(asdict(made))
        print()
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {"torch": torch.__version__, "gigabytes": arguments.gigabytes, "rows": rows}, file, indent=2
            )


if __name__ == "__main__":
    main()
