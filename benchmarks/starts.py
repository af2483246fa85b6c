"""Imports, the first step and the memory then, each in a fresh interpreter; contestants in turns.

    python benchmarks/starts.py CONTESTANT START

is one such interpreter: it trains the smallest model and prints, when the first step is made, the seconds
that the imports took, those since START (a reading of `time.perf_counter`, which all processes of a machine
share; or "cpu", for what it had on a processor), and its memory.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

_BEGAN = (perf_counter(), process_time())

import torch  # noqa: E402 - what follows is beside it

_TORCH = (perf_counter(), process_time())

GOAL = 0.3
"""The most seconds that our first step may come after a hand-written script's."""

IMPORT_GOAL = 0.1
"""The most of torch's own time that our import may take beside it."""


@dataclass(frozen=True)
class Start:
    """One interpreter's figures.

    Attributes:
        torch: Seconds that torch's import took.
        imports: Seconds that the contestant's imports took after torch's.
        first: Seconds from the command to the end of the first step.
        memory: MiB that the process held then; None where the system does not say.
    """

    torch: float
    imports: float
    first: float
    memory: float | None


def resident() -> float | None:
    """MiB that this process holds."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(each for each in status.read_text(encoding="ascii").splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def start(name: str, cpu: bool = False) -> Start:
    """Run one interpreter. It may keep the bytecode of what it imports, whatever is said here."""
    command = [sys.executable, str(Path(__file__)), name, "cpu" if cpu else repr(perf_counter())]
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=kept)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"torch"')]
    if not lines:
        raise RuntimeError(f"{name} ended before its first step:\n{done.stderr}")
    return Start(**json.loads(lines[-1]))


def starts(names: list[str], rounds: int, cpu: bool = False) -> dict[str, Start]:
    """Medians by contestant, each of which was started once before.

    Who installs a package has its bytecode: pip compiles all that it installs, but not the files of a working
    tree, which ours is here. The first start leaves bytecode beside those too.
    """
    for name in names:
        start(name, cpu)
    found: dict[str, list[Start]] = {name: [] for name in names}
    for round_ in range(rounds):
        for name in random.Random(round_).sample(names, len(names)):
            found[name].append(start(name, cpu))
    return {name: _median(each) for name, each in found.items()}


def _median(found: list[Start]) -> Start:
    memory = [each.memory for each in found if each.memory is not None]
    return Start(
        statistics.median(each.torch for each in found),
        statistics.median(each.imports for each in found),
        statistics.median(each.first for each in found),
        statistics.median(memory) if memory else None,
    )


def main(name: str, began: str) -> None:
    """Be the interpreter that is measured."""
    torch.set_num_threads(1)
    peer = load(name)
    cpu = began == "cpu"
    imports = process_time() - _TORCH[1] if cpu else perf_counter() - _TORCH[0]
    of_torch = _TORCH[cpu] - _BEGAN[cpu]

    class Reporter:
        """A clock that reports when the second loss is computed: the first step is made."""

        losses = -peer.losses_before

        def __call__(self) -> None:
            self.losses += 1
            if self.losses == 2:
                spent = process_time() if cpu else perf_counter() - float(began)
                made = {"torch": of_torch, "imports": imports, "first": spent, "memory": resident()}
                print(json.dumps(made), file=sys.__stdout__, flush=True)
                os._exit(0)

    peer.train(Job(TINY, steps=4, warm_up=0, block=1, clock=Reporter()))


if __name__ == "__main__":
    from peers import load
    from workloads import TINY, Job

    main(sys.argv[1], sys.argv[2])
