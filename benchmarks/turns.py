"""Contestants in turns: who is run where, and what comes out of it.

In each round every contestant trains once, in another order each time, all in one process; those that change
what is for all of a process are run in one of their own, with the hand-written loop beside them there. A
round's figure is the difference to the hand-written loop of that round and place, so that a machine that gets
busier slows both. No figure is kept of a contestant that did other work: what its model ends at is compared.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from calls import CallCounter
from peers import HAND, ROSTER, Peer, load
from rows import Row
from workloads import CLOCKS, Clock, Job, Ticking

_NOTHING_CHANGED = 1e-3


@dataclass(frozen=True)
class Turn:
    """What one turn gave.

    Attributes:
        seconds: Of a step, or of a batch.
        outcome: The loss that the trained model, or the evaluation, ends at; the sum of all predictions.
        before: The untrained model's loss.
    """

    seconds: float
    outcome: float
    before: float

    def same_work(self, other: Turn) -> bool:
        """Whether another's outcome is that of the same work: to a thousandth of what training changed."""
        return abs(self.outcome - other.outcome) <= _NOTHING_CHANGED * abs(other.outcome - other.before)


@contextmanager
def silenced() -> Iterator[None]:
    """What contestants print goes to a real file, since some ask whether it is a terminal."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def act(peer: Peer, row: Row, job: Job) -> float:
    """Let a contestant do a job.

    Returns:
        What it ended at.
    """
    if row.verb == "train":
        peer.train(job)
        return job.probed()
    if row.verb == "evaluate":
        return peer.evaluate(job)
    job.net = Ticking(job.net, job.clock)
    return float(torch.cat(list(peer.predict(job))).double().sum())


def turn(peer: Peer, row: Row, steps: int) -> Turn:
    """One turn of a contestant."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory, silenced():
        job = row.job(steps, Path(directory))
        before = job.probed() if row.verb == "train" else 0.0
        gc.collect()
        outcome = act(peer, row, job)
        return Turn(job.seconds(), outcome, before)


def counted(peer: Peer, row: Row) -> dict[str, int]:
    """Python and C calls of a step, as the profiler counts them."""
    counter = CallCounter()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory, silenced():
        act(peer, row, row.job(20, Path(directory), warm_up=10, clock=counter))
    return counter.per_step(10, 20)


class Place:
    """This process, and the contestants that are imported into it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.peers = {name: load(name) for name in names}

    def lacks(self, name: str) -> dict[str, str]:
        """What a contestant has no part for."""
        return dict(self.peers[name].lacks)

    def turn(self, name: str, row: Row, steps: int) -> Turn:
        """One turn."""
        return turn(self.peers[name], row, steps)

    def calls(self, name: str, row: Row) -> dict[str, int]:
        """Calls of a step."""
        return counted(self.peers[name], row)

    def close(self) -> None:
        """Nothing."""


class OtherPlace(Place):
    """A process of its own, which stays; one line of JSON each way."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        program = str(Path(__file__).with_name("place.py"))
        clock = next(name for name, read in CLOCKS.items() if read is Clock.read)
        self.process = subprocess.Popen(
            [sys.executable, program, clock, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def _ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {', '.join(self.names)} has ended: its error is above")
        return json.loads(answer)

    def lacks(self, name: str) -> dict[str, str]:
        """What a contestant has no part for."""
        return dict(self._ask(ask="lacks", name=name))

    def turn(self, name: str, row: Row, steps: int) -> Turn:
        """One turn."""
        return Turn(**self._ask(ask="turn", name=name, row=row.name, steps=steps))

    def calls(self, name: str, row: Row) -> dict[str, int]:
        """Calls of a step."""
        return dict(self._ask(ask="calls", name=name, row=row.name))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


def answer(place: Place, question: dict[str, Any], rows: dict[str, Row]) -> Any:
    """What another process asks of this one."""
    name = question["name"]
    if question["ask"] == "lacks":
        return place.lacks(name)
    row = rows[question["row"]]
    if question["ask"] == "calls":
        return place.calls(name, row)
    return asdict(place.turn(name, row, question["steps"]))


@dataclass(frozen=True)
class Figure:
    """A contestant's figure of a row, in microseconds; medians over the rounds.

    Attributes:
        row: The row's name.
        name: The contestant's.
        spent: Of a step, or a batch.
        added: To the hand-written loop of the same round.
        lowest: Of the differences.
        highest: Of the differences.
        ratio: To the hand-written loop of the same round.
    """

    row: str
    name: str
    spent: float
    added: float
    lowest: float
    highest: float
    ratio: float


class Turns:
    """All contestants, wherever they are.

    Attributes:
        lacks: What each has no part for, by its name.
    """

    def __init__(self, names: list[str]) -> None:
        here = [name for name in names if not ROSTER[name].apart]
        self.places = [Place(here)]
        self.places += [OtherPlace([HAND, name]) for name in names if ROSTER[name].apart]
        # What was imported is not looked through again by the collector, in nobody's time.
        gc.collect()
        gc.freeze()
        self.where = {name: place for place in self.places[::-1] for name in place.names}
        self.lacks = {name: self.where[name].lacks(name) for name in names}
        self.names = names

    def __enter__(self) -> Self:
        """All contestants."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the other processes."""
        for place in self.places:
            place.close()
        gc.unfreeze()

    def able(self, row: Row) -> list[str]:
        """Those that have a part for all that a row needs."""
        return [name for name in self.names if not set(row.needs) & set(self.lacks[name])]

    def calls(self, row: Row) -> dict[str, dict[str, int]]:
        """Python and C calls of a step, by contestant."""
        return {name: self.where[name].calls(name, row) for name in self.able(row)}

    def measure(self, row: Row, rounds: int, steps: int) -> list[Figure]:
        """A row's figures.

        Raises:
            RuntimeError: A contestant did not do the hand-written loop's work.
        """
        spent: dict[str, list[tuple[float, float]]] = {}
        for round_ in range(rounds):
            for place in self.places:
                names = [name for name in place.names if name in self.able(row)]
                if names == [HAND] and len(self.places) > 1 and place is not self.places[0]:
                    continue
                order = random.Random(round_).sample(names, len(names))
                turns = {name: place.turn(name, row, steps) for name in order}
                for name, one in turns.items():
                    if not one.same_work(turns[HAND]):
                        raise RuntimeError(
                            f"{row.name}: {name} ends at {one.outcome:.7g}, and the hand-written loop at"
                            f" {turns[HAND].outcome:.7g}: they did not do the same work"
                        )
                    if name != HAND or place is self.places[0]:
                        spent.setdefault(name, []).append((one.seconds * 1e6, turns[HAND].seconds * 1e6))
        return [_figure(row, name, spent[name]) for name in self.names if name in spent]


def _figure(row: Row, name: str, pairs: list[tuple[float, float]]) -> Figure:
    differences = [one - hand for one, hand in pairs]
    return Figure(
        row.name,
        name,
        statistics.median(one for one, _ in pairs),
        statistics.median(differences),
        min(differences),
        max(differences),
        statistics.median(one / hand for one, hand in pairs),
    )
