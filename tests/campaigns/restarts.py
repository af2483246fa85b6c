"""Runs that are interrupted again and again: by signals, which they obey, and by kills."""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.restart_job import BATCH, EPOCHS, SAMPLES

from drivetrain.core.errors import EXIT_REQUEUE

STRATEGIES = ("single", "ddp", "fsdp")
Process = subprocess.Popen[str]
_LONGEST = 600.0  # seconds that a program may take
_SPREAD = 1.5  # seconds after the begin of training within which a fault comes; some come before


@dataclass
class Score:  # what was survived, and what it has cost
    runs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    counted: int = 0
    again: int = 0
    useful: float = 0.0
    wall: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    endings: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        made = self.counted + self.again
        kinds = ", ".join(f"{count} x {name}" for name, count in sorted(self.faults.items()))
        times = {"from a kill to training again": self.recoveries, "from a signal to the end": self.endings}
        lines = [
            f"runs completed: {self.runs}",
            f"faults survived: {self.faults.total()} ({kinds})",
            f"work lost: {self.again} of {made} steps made again ({self.again / max(made, 1):.1%})",
            f"goodput: {self.useful / max(self.wall, 1e-9):.1%} of {self.wall:.0f} s in steps that count",
            *(
                f"{what}: median {statistics.median(s):.1f} s, longest {max(s):.1f} s"
                for what, s in times.items()
                if s
            ),
            *(f"FAILED: {each}" for each in self.failures),
            f"failures: {len(self.failures)}",
        ]
        return "\n".join(lines)


@dataclass
class Job:  # one run, over all the programs that it takes
    directory: Path
    strategy: str
    every: str = "1 epoch"
    workers: int = 0

    def start(self, *launcher: str) -> Process:  # by itself or by the words of a launcher
        self.directory.mkdir(parents=True, exist_ok=True)
        program = str(Path(__file__).with_name("restart_job.py"))
        words = [program, str(self.directory), self.strategy, self.every, str(self.workers)]
        command = ["-m", "drivetrain", "launch", *launcher, *words] if launcher else ["-W", "error", *words]
        with (self.directory / "output").open("a", encoding="utf-8") as output:
            options: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "text": True}
            options.update(start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            return subprocess.Popen([sys.executable, *command], **options)

    @property
    def weights(self) -> str | None:  # what it has learned, as a hash; None before its end
        file = self.directory / "done"
        return file.read_text(encoding="ascii") if file.exists() else None

    @property
    def output(self) -> str:  # the last lines that its programs have written
        return "\n".join((self.directory / "output").read_text(encoding="utf-8").splitlines()[-15:])

    def attempts(self) -> list[list[list[dict[str, Any]]]]:
        """What was written down: for each attempt, in their order, the rows of each process."""
        found: dict[str, list[list[dict[str, Any]]]] = {}
        for each in sorted(self.directory.glob("witness-*.jsonl")):
            # a process that is killed while it writes leaves half a line.
            rows = [json.loads(line) for line in each.read_text("utf-8").splitlines() if line.endswith("}")]
            found.setdefault(each.name.split("-")[1], []).append(rows)
        return [found[each] for each in sorted(found, key=float)]

    def steps_since(self, moment: float) -> list[tuple[float, int]]:
        rows = [row for attempt in self.attempts() for each in attempt for row in each]
        return sorted((row["time"], row["step"]) for row in rows if row["step"] and row["time"] > moment)

    def judge(self, score: Score) -> None:
        """See that each sample was learned from once in every epoch; a step counts as last made."""
        epochs: dict[int, tuple[int, list[int]]] = {}
        seconds: dict[int, float] = {}
        made = 0
        for attempt in self.attempts():
            for number in {row["step"] for rows in attempt for row in rows} - {None}:
                rows = [row for each in attempt for row in each if row["step"] == number]
                epochs[number] = rows[0]["epoch"], [sample for row in rows for sample in row["samples"]]
                made += 1
            for before, row in zip(attempt[0], attempt[0][1:], strict=False):
                seconds[row["step"]] = row["time"] - before["time"]
        for epoch in range(EPOCHS):
            seen = Counter(each for of, samples in epochs.values() if of == epoch for each in samples)
            lost, twice = set(range(SAMPLES)) - seen.keys(), [each for each in seen if seen[each] > 1]
            if lost or twice:
                score.failures.append(f"{self.directory.name}, epoch {epoch}: lost {lost}, repeated {twice}")
        score.runs += 1
        score.counted += len(epochs)
        score.again += made - len(epochs)
        score.useful += sum(seconds.values())


def run_signals(number: int, seed: int, directory: Path, strategy: str) -> Score:
    """Send signals at random moments, start the program again after each, and compare the weights."""
    score, chance = Score(), random.Random(f"{seed} {strategy}")
    straight = Job(directory / f"straight-{strategy}", strategy)
    if straight.start().wait(_LONGEST) != 0:
        raise RuntimeError(f"the undisturbed run has failed:\n{straight.output}")
    began = time.time()
    while score.faults.total() < number and not score.failures:
        name = f"signals-{strategy}-{score.runs}"
        job = Job(directory / name, strategy, workers=chance.choice((0, 2)))
        while job.weights is None and not score.failures:
            process = job.start()
            if score.faults.total() < number:
                _signal(job, process, chance, score)
            process.wait(_LONGEST)
        if job.weights != straight.weights:
            score.failures.append(f"{name}: not the weights of the undisturbed run\n{job.output}")
        job.judge(score)
    score.wall = time.time() - began
    return score


def _group(process: int) -> int | None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        return os.getpgid(process)
    return None


def _signal(job: Job, process: Process, chance: random.Random, score: Score) -> None:
    """Send one signal, to one process or to all, and see that the program ends as it should."""
    is_training = _until_training(job, process, time.time(), chance)
    if process.poll() is not None:
        return
    number = chance.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
    # Those of its group: workers of the data have left it.
    ranks = [process.pid, *(each for each in _children(process.pid) if _group(each) == process.pid)]
    whom, sent = chance.choice(["all", "one"]), time.time()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number) if whom == "all" else os.kill(chance.choice(ranks), number)
    score.faults[f"{number.name} to {whom}"] += 1
    code = process.wait(_LONGEST)
    if not is_training:  # before there is a fit, a signal does what it always does
        return
    score.endings.append(time.time() - sent)
    right = -signal.SIGINT if number is signal.SIGINT else EXIT_REQUEUE
    last = max((step for _, step in job.steps_since(0)), default=0)
    if code != right and last != EPOCHS * SAMPLES // BATCH:  # a fit that is over leaves signals alone
        score.failures.append(f"{number.name} to {whom}: exit code {code} in place of {right}\n{job.output}")


def _until_training(job: Job, process: Process, since: float, chance: random.Random) -> bool:
    """Wait for a random moment; return whether training had begun. One in six comes before."""
    deadline = since + (chance.uniform(0.0, 4.0) if chance.random() < 1 / 6 else _LONGEST)
    while not job.steps_since(since) and process.poll() is None:
        if time.time() > deadline:
            return False
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, _SPREAD))
    return True


def _children(pid: int) -> list[int]:  # the ranks that one process has started
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int(each.joinpath("stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            if parent == pid and "restart_job" in each.joinpath("cmdline").read_text("utf-8", "replace"):
                found.append(int(each.name))
    return found


def run_kills(number: int, seed: int, directory: Path, strategy: str) -> Score:
    """Kill processes that `drivetrain launch` has started, or all of them, until enough are killed."""
    score, chance = Score(), random.Random(f"{seed} {strategy}")
    began = time.time()
    while score.faults.total() < number and not score.failures:
        job = Job(directory / f"kills-{strategy}-{score.runs}", strategy, every="10 steps")
        size = "2"
        while job.weights is None and not score.failures:
            process = job.start("--devices", size, "--max-restarts", "1000")
            size = _kill(job, process, chance, score, number)
        if not score.failures:
            job.judge(score)
    score.wall = time.time() - began
    return score


def _kill(job: Job, process: Process, chance: random.Random, score: Score, number: int) -> str:
    """Kill one process after the other under one launcher, perhaps that too; how many to start then."""
    killed = time.time()
    while process.poll() is None:
        _until_training(job, process, killed, chance)
        again = job.steps_since(killed)
        if score.faults and again:
            score.recoveries.append(again[0][0] - killed)
        if score.faults.total() >= number:
            process.wait(_LONGEST)
            break
        ranks, killed = _children(process.pid), time.time()
        if chance.random() < 1 / 5:  # the machine goes down
            for each in (process.pid, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.wait(_LONGEST)
            score.faults["SIGKILL of all, then another number"] += 1
            return chance.choice(("2", "2", "1", "4"))
        if ranks and process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(ranks), signal.SIGKILL)
            score.faults["SIGKILL of one process"] += 1
    if process.returncode != 0:
        score.failures.append(f"{job.directory.name}: exit code {process.returncode}\n{job.output}")
    return "2"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Interrupt runs: nothing is lost, repeated or wrong.")
    add = parser.add_argument
    add("--signals", type=int, default=0, help="signals at random moments, for each strategy")
    add("--kills", type=int, default=0, help="SIGKILLs under `drivetrain launch`; not for single")
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="default: all")
    add("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    add("--directory", help="where (default: a temporary one)")
    options = parser.parse_args(arguments)
    is_bad = False
    with tempfile.TemporaryDirectory() as own:
        for strategy in options.strategies:
            campaigns = [(options.signals, run_signals), (options.kills * (strategy != "single"), run_kills)]
            for number, campaign in campaigns:
                if number:
                    score = campaign(number, options.seed, Path(options.directory or own), strategy)
                    is_bad = is_bad or bool(score.failures)
                    sys.stdout.write(f"\n{strategy}, {campaign.__name__.removeprefix('run_')}:\n{score}\n")
                    sys.stdout.flush()
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
