"""The fault campaign: checkpoints under faults of every kind at every operation, and the score.

Run as `python -m tests.campaigns.checkpoints`; see `--help`. It ends with exit code 1 if anything happened
that should not.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from tests.campaigns.kills import run_kills
from tests.campaigns.shards import run_shards
from tests.campaigns.trials import (
    Case,
    Outcome,
    Storage,
    double_cases,
    operations,
    run_case,
    single_cases,
)
from tests.support.fault_kinds import Operation

from drivetrain.checkpoint.storage.filesystem import FileSystem
from drivetrain.checkpoint.storage.schemes import file_system

FAULTS = 1200
"""How many faults are planned if nobody says otherwise."""

_SINGLES = 3
"""Trials with one fault to each that has a second in the recovery."""


@dataclass
class Score:
    """What a campaign has found.

    Attributes:
        trials: How many lives were lived.
        faults: How many faults have happened, by kind.
        on_newest: In how many of their trials every process went on from the newest that was saved.
        on_earlier: In how many that was once damaged, and the one before was taken.
        loads: How many checkpoints were loaded, and compared bit for bit.
        wrong: How many of them had other bytes than were saved.
        asides: Why something was set aside, and how often.
        failures: The outcomes that are not good.
    """

    trials: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    on_newest: Counter[str] = field(default_factory=Counter)
    on_earlier: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    wrong: int = 0
    asides: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one trial."""
        self.trials += 1
        self.loads += outcome.loads
        self.wrong += len(outcome.wrong)
        self.faults.update(outcome.struck)
        if outcome.is_good:
            (self.on_newest if outcome.newest else self.on_earlier).update(outcome.struck)
        else:
            self.failures.append(outcome)
        self.asides.update(outcome.asides)

    def __str__(self) -> str:
        """The score as a table, with a line for each failure from which it can be repeated."""
        lines = [f"{'fault':<14}{'happened':>10}{'newest':>10}{'earlier':>10}{'failed':>10}"]
        for kind in [*sorted(self.faults), "all"]:
            counts = [
                counter.total() if kind == "all" else counter[kind]
                for counter in (self.faults, self.on_newest, self.on_earlier)
            ]
            counts.append(counts[0] - counts[1] - counts[2])
            lines.append(f"{kind:<14}" + "".join(f"{count:>10}" for count in counts))
        lines += [
            "",
            "newest: resumed from the newest checkpoint; earlier: that one was damaged, and said to be",
            f"trials: {self.trials}; loaded and compared: {self.loads}; wrong bytes: {self.wrong}",
            "",
            "warned of, and how often:",
            *(f"{count:>8}  {text}" for text, count in self.asides.most_common()),
        ]
        for outcome in self.failures:
            lines += ["", f"FAILED: {outcome.case}", *outcome.wrong, *outcome.complaints]
        lines += ["", f"failures: {len(self.failures)}"]
        return "\n".join(lines)


def cases(
    storages: Sequence[Storage], seed: int, asked: Callable[[Storage], list[Operation]]
) -> Iterator[Case]:
    """Trials without end: every kind of fault at every operation, in an order drawn from the seed.

    Args:
        storages: The storages, in turn.
        seed: Of everything that is drawn.
        asked: Gives the operations of a life without faults.
    """
    return chain.from_iterable(zip(*(_cases_of(each, seed, asked(each)) for each in storages), strict=True))


def _cases_of(storage: Storage, seed: int, asked: list[Operation]) -> Iterator[Case]:
    chance = random.Random(seed)
    double = double_cases(storage, asked, seed)
    while True:
        singles = single_cases(storage, asked, chance.randrange(1 << 30))
        chance.shuffle(singles)
        for number, case in enumerate(singles, 1):
            yield case
            if number % _SINGLES == 0:
                yield next(double)


def run_campaign(
    faults: int,
    seed: int,
    directory: str,
    storages: Sequence[Storage] = ("disk", "objects"),
    tell: Callable[[str], None] = lambda text: None,
    files: FileSystem | None = None,
) -> Score:
    """Make trials until enough faults have happened.

    Args:
        faults: How many.
        seed: The same seed gives the same trials.
        directory: For the checkpoints; what is put there is deleted after each trial.
        storages: Which to try.
        tell: Is told of the progress.
        files: The file system of the directory; None for what each trial says.
    """
    place = f"{directory}/trial"
    score = Score()
    trials = cases(storages, seed, lambda storage: operations(storage, place, files))
    told = 0
    while score.faults.total() < faults:
        score.add(run_case(next(trials), place, files))
        if score.faults.total() * 10 // faults > told:
            told = score.faults.total() * 10 // faults
            tell(f"{score.faults.total()} faults, {len(score.failures)} failures")
    return score


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are tiny
    with tempfile.TemporaryDirectory(dir=_parent(options.directory)) as own:
        place = options.directory if "://" in (options.directory or "") else own
        if options.trial is not None:
            score = Score()
            score.add(run_case(options.trial, f"{place}/trial", _files(place)))
        else:
            storages: tuple[Storage, ...] = ("objects",) if options.remote else ("disk", "objects")
            score = run_campaign(options.faults, options.seed, place, storages, _say, _files(place))
            for outcome in run_kills(options.kills, options.seed, os.path.join(own, "kills")):
                score.add(outcome)
            for outcome in run_shards(options.shards, options.seed, own):
                score.add(outcome)
    _say(f"\n{score}")
    return 1 if score.failures else 0


def _files(directory: str) -> FileSystem | None:
    """The file system of an address; None for what each trial says."""
    return file_system(directory) if "://" in directory else None


def _trial(text: str) -> Case:
    try:
        return Case.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parent(directory: str | None) -> str | None:
    if directory is None or "://" in directory:
        return None
    os.makedirs(directory, exist_ok=True)
    return os.path.abspath(directory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.checkpoints",
        description="Save, kill, damage, resume; and check that nothing is ever lost or wrong.",
    )
    add = parser.add_argument
    add("--faults", type=int, default=FAULTS, help="how many faults to let happen (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    add("--directory", help="where; an address such as s3://bucket/scratch too (default: a temporary one)")
    add("--remote", action="store_true", help="only the protocol for object stores")
    add("--kills", type=int, default=40, help="real SIGKILLs of a process (default: %(default)s)")
    add("--shards", type=int, default=12, help="faults of one of two processes (default: %(default)s)")
    add("--trial", type=_trial, help="repeat one trial, as a failure names it")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
