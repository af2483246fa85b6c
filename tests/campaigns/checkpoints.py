"""The fault campaign: checkpoints under faults of every kind at every operation, and the score."""

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from tests.campaigns.processes import run_kills, run_shards
from tests.campaigns.trials import Case, Outcome, Storage, double_cases, operations, run_case, single_cases
from tests.support.fault_kinds import Operation

from drivetrain.checkpoint.storage.filesystem import FileSystem
from drivetrain.checkpoint.storage.schemes import file_system


@dataclass
class Score:
    """What a campaign has found; `newest` counts faults after which every process resumed from the newest."""

    trials: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    newest: Counter[str] = field(default_factory=Counter)
    earlier: Counter[str] = field(default_factory=Counter)
    loads: int = 0
    wrong: int = 0
    asides: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:  # count one trial
        self.trials += 1
        self.loads += outcome.loads
        self.wrong += len(outcome.wrong)
        self.faults.update(outcome.struck)
        if outcome.is_good:
            (self.newest if outcome.newest else self.earlier).update(outcome.struck)
        else:
            self.failures.append(outcome)
        self.asides.update(outcome.asides)

    def __str__(self) -> str:  # a table, with a line for each failure from which it can be repeated
        lines = [f"{'fault':<14}{'happened':>10}{'newest':>10}{'earlier':>10}{'failed':>10}"]
        counters = (self.faults, self.newest, self.earlier)
        for kind in [*sorted(self.faults), "all"]:
            counts = [each.total() if kind == "all" else each[kind] for each in counters]
            counts.append(counts[0] - counts[1] - counts[2])
            lines.append(f"{kind:<14}" + "".join(f"{count:>10}" for count in counts))
        lines += [
            "newest: resumed from the newest checkpoint; earlier: that one was damaged, and said to be",
            f"trials: {self.trials}; loaded and compared: {self.loads}; wrong bytes: {self.wrong}",
            *(f"{count:>8}  {text}" for text, count in self.asides.most_common()),
        ]
        for outcome in self.failures:
            lines += ["", f"FAILED: {outcome.case}", *outcome.wrong, *outcome.complaints]
        return "\n".join([*lines, f"failures: {len(self.failures)}"])


def _cases(storage: Storage, seed: int, asked: list[Operation]) -> Iterator[Case]:
    """Trials without end: every kind of fault at every operation, and for three of them one of two faults."""
    chance = random.Random(seed)
    double = double_cases(storage, asked, seed)
    while True:
        singles = single_cases(storage, asked, chance.randrange(1 << 30))
        chance.shuffle(singles)
        for number, case in enumerate(singles, 1):
            yield case
            if number % 3 == 0:
                yield next(double)


def run_campaign(
    faults: int,
    seed: int,
    directory: str,
    storages: Sequence[Storage] = ("disk", "objects"),
    files: FileSystem | None = None,
) -> Score:
    """Make trials, the same for a seed, until enough faults have happened, in `files` or where each says."""
    place, score = f"{directory}/trial", Score()
    every = [_cases(each, seed, operations(each, place, files)) for each in storages]
    trials = chain.from_iterable(zip(*every, strict=True))
    while score.faults.total() < faults:
        score.add(run_case(next(trials), place, files))
    return score


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Save, kill, damage, resume: nothing is lost or wrong.")
    add = parser.add_argument
    add("--faults", type=int, default=1200, help="how many faults to let happen (default: %(default)s)")
    add("--seed", type=int, default=0, help="of everything that is drawn (default: %(default)s)")
    add("--directory", help="where; an address such as s3://bucket/scratch too (default: a temporary one)")
    add("--remote", action="store_true", help="only the protocol for object stores")
    add("--kills", type=int, default=40, help="real SIGKILLs of a process (default: %(default)s)")
    add("--shards", type=int, default=12, help="faults of one of two processes (default: %(default)s)")
    add("--trial", type=Case.parse, help="repeat one trial, as a failure names it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the tensors are tiny
    is_address = "://" in (options.directory or "")
    if options.directory and not is_address:
        os.makedirs(options.directory, exist_ok=True)
    parent = os.path.abspath(options.directory) if options.directory and not is_address else None
    with tempfile.TemporaryDirectory(dir=parent) as own:
        place = options.directory if is_address else own
        files = file_system(place) if is_address else None
        if options.trial is not None:
            score = Score()
            score.add(run_case(options.trial, f"{place}/trial", files))
        else:
            storages: tuple[Storage, ...] = ("objects",) if options.remote else ("disk", "objects")
            score = run_campaign(options.faults, options.seed, place, storages, files)
            for outcome in run_kills(options.kills, options.seed, os.path.join(own, "kills")):
                score.add(outcome)
            for outcome in run_shards(options.shards, options.seed, own):
                score.add(outcome)
    sys.stdout.write(f"\n{score}\n")
    return 1 if score.failures else 0


if __name__ == "__main__":
    sys.exit(main())
