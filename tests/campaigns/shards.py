"""Faults of one process out of two that save together."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from tests.campaigns.life import Life
from tests.campaigns.trials import Outcome, outcome_of
from tests.support.fault_kinds import OPERATIONS, Fault, FaultKind
from tests.support.faults import FaultyFileSystem

from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.testing.distributed import run_distributed

_SIZE = 2
_SURVIVABLE: list[FaultKind] = [kind for kind in OPERATIONS if kind not in ("kill", "power cut")]
_OPERATIONS = 60
"""Where faults strike; the second process, which writes its share only, does about as many things."""


def run_shards(number: int, seed: int, directory: str) -> list[Outcome]:
    """Let faults strike one process of two, and check what is there.

    Args:
        number: Of faults; a third of them are kills. None where processes cannot act together.
        seed: Decides which, when and whom.
        directory: One that exists, for directories with checkpoints.
    """
    if not (number and torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return []
    # What every process would otherwise import anew.
    importlib.import_module("torch.distributed.checkpoint")
    chance = random.Random(seed)
    kills = number // 3 if hasattr(signal, "SIGKILL") else 0
    faults = [Fault(chance.randint(1, _OPERATIONS), "kill", chance.randrange(1000)) for _ in range(kills)]
    for each in range(number - kills):
        kind = _SURVIVABLE[each % len(_SURVIVABLE)]
        faults.append(Fault(chance.randint(1, _OPERATIONS), kind, chance.randrange(1000)))
    places = [os.path.join(directory, f"shards-{each}") for each in range(number)]
    victims = [chance.randrange(_SIZE) for _ in faults]
    lives = []
    for place, fault, victim in zip(places[:kills], faults, victims, strict=False):
        lives.append(_killed(place, fault, victim))
    lives += run_distributed(_survive, places[kills:], faults[kills:], victims[kills:], timeout=300)[0]
    outcomes = []
    for life, fault, victim in zip(lives, faults, victims, strict=True):
        case = f"sharded: {fault} on rank {victim} of --shards {number} --seed {seed}"
        try:
            life.end(LOCAL)
        except Exception:  # a trial that breaks is a finding, and the others are to go on
            life.complaints.append(f"it broke:\n{traceback.format_exc()}")
        outcomes.append(outcome_of(life, case))
    return outcomes


def _killed(directory: str, fault: Fault, victim: int) -> Life:
    """A life in which one process is gone at some moment, so that the other cannot go on either."""
    life = Life(directory)
    note = Path(f"{directory}.json")
    try:
        run_distributed(_die, directory, fault, victim, str(note))
    except RuntimeError as error:
        if f"rank {victim} failed:\nit died with exit code {-signal.SIGKILL} and" not in str(error):
            life.complaints.append(f"not the end that was planned: {error}")
    told = json.loads(note.read_text(encoding="utf-8"))
    life.acknowledged, life.attempted = told["acknowledged"], told["attempted"]
    return life


def _die(directory: str, fault: Fault, victim: int, note: str) -> None:
    ranks = Ranks.of_job()
    life = Life(directory, ranks=ranks)
    lives_on = life.live(FaultyFileSystem(LOCAL, *([fault] if ranks.rank == victim else [])))
    if ranks.rank == victim:
        told = {"acknowledged": life.acknowledged, "attempted": life.attempted}
        Path(note).write_text(json.dumps(told), encoding="utf-8")
    if not lives_on:
        os.kill(os.getpid(), signal.SIGKILL)


def _survive(directories: list[str], faults: list[Fault], victims: list[int]) -> list[Life]:
    """Lives in which one process meets an error, of which both hear."""
    ranks = Ranks.of_job()
    lives = []
    for directory, fault, victim in zip(directories, faults, victims, strict=True):
        life = Life(directory, ranks=ranks)
        life.live(FaultyFileSystem(LOCAL, *([fault] if ranks.rank == victim else [])))
        told = ranks.all_gather(replace(life, ranks=ALONE))
        whole = told[0]
        for other in told[1:]:
            whole.steps += other.steps
            whole.wrong += other.wrong
            whole.complaints += other.complaints
            whole.loads += other.loads
        lives.append(whole)
    return lives
