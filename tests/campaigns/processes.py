"""Faults of real processes: SIGKILLs at any moment of a save, and faults of one of two that save together."""

import importlib
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.campaigns.life import Life, save
from tests.campaigns.trials import Outcome, outcome_of
from tests.support.fault_kinds import OPERATIONS, Fault
from tests.support.faults import FaultyFileSystem
from tests.support.messages import heard

from drivetrain.checkpoint.saving.manager import CheckpointManager
from drivetrain.checkpoint.storage.filesystem import LOCAL
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.testing.distributed import run_distributed

_OPERATIONS = 60
"""Where faults strike; a second process, which writes its share only, does about as many things."""


def _ended(life: Life, case: str) -> Outcome:  # check what is there after a life
    try:
        life.end(LOCAL)
    except Exception:  # a trial that breaks is a finding, and the others are to go on
        life.complaints.append(f"it broke:\n{traceback.format_exc()}")
    return outcome_of(life, case)


def run_kills(number: int, seed: int, directory: str) -> list[Outcome]:
    """Kill processes that save into one directory, one after the other, and check after each."""
    chance, life, outcomes = random.Random(seed), Life(directory), []
    steps, started = Path(f"{directory}.steps"), Path(f"{directory}.started")
    for each in range(number):
        life = Life(directory, each % 2 == 1, acknowledged=life.acknowledged)
        code = _killed(life, steps, started, chance.uniform(0.002, 0.06))
        if code != -signal.SIGKILL:
            life.complaints.append(f"the process ended by itself, with {code}")
        told = steps.read_text(encoding="ascii").split() if steps.exists() else []
        life.acknowledged = max(life.acknowledged, *map(int, told[-1:]), 0)
        life.attempted = life.acknowledged + 1
        outcome = _ended(life, f"kill {each + 1} of --kills {number} --seed {seed}")
        life.acknowledged += 1  # the last process has saved, too
        outcome.struck = ["SIGKILL"]
        outcomes.append(outcome)
    return outcomes


def _killed(life: Life, steps: Path, started: Path, delay: float) -> int | None:
    """Let a process work for a while and kill it; its exit code."""
    started.unlink(missing_ok=True)
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=_work, args=(life, str(steps), str(started)))
    process.start()
    while process.is_alive() and not started.exists():
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()
    code: int | None = process.exitcode
    process.close()
    return code


def _work(life: Life, steps: str, started: str) -> None:
    """Save without end, and write down what is surely saved."""
    torch.set_num_threads(1)
    told = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Path(started).touch()
    manager = CheckpointManager(life.directory, life.config)
    with heard() as warnings:
        step = life.check_load(manager.load_latest())
    assert not warnings, "after a kill there is nothing to warn of"
    assert not life.wrong, life.wrong
    while True:
        step += 1
        save(manager, step)
        os.write(told, b"%d\n" % step)


def run_shards(number: int, seed: int, directory: str) -> list[Outcome]:
    """Let faults, a third of them kills, strike one process of two, and check what is there."""
    if not (number and torch.distributed.is_gloo_available()):
        return []
    importlib.import_module("torch.distributed.checkpoint")  # which every process would import anew
    chance, kills = random.Random(seed), number // 3
    survivable = [kind for kind in OPERATIONS if kind not in ("kill", "power cut")]
    faults = [
        Fault(
            chance.randint(1, _OPERATIONS),
            "kill" if each < kills else survivable[each % len(survivable)],
            chance.randrange(1000),
        )
        for each in range(number)
    ]
    trials = [
        (os.path.join(directory, f"shards-{each}"), fault, chance.randrange(2))
        for each, fault in enumerate(faults)
    ]
    lives = [_dead(*each) for each in trials[:kills]]
    lives += run_distributed(_survive, trials[kills:], timeout=600)[0]
    case = "sharded: {} on rank {} of --shards {} --seed {}"
    return [
        _ended(life, case.format(fault, victim, number, seed))
        for life, (_, fault, victim) in zip(lives, trials, strict=True)
    ]


def _dead(directory: str, fault: Fault, victim: int) -> Life:
    """A life in which one process is gone at some moment, so that the other cannot go on either."""
    life, note = Life(directory), Path(f"{directory}.json")
    try:
        run_distributed(_die, directory, fault, victim, str(note))
    except RuntimeError as error:
        if f"rank {victim} failed:\nit was killed by SIGKILL" not in str(error):
            life.complaints.append(f"not the end that was planned: {error}")
    life.acknowledged, life.attempted = json.loads(note.read_text(encoding="utf-8"))
    return life


def _die(directory: str, fault: Fault, victim: int, note: str) -> None:
    ranks = Ranks.of_job()
    life = Life(directory, ranks=ranks)
    lives_on = life.live(FaultyFileSystem(LOCAL, *([fault] if ranks.rank == victim else [])))
    if ranks.rank == victim:
        Path(note).write_text(json.dumps([life.acknowledged, life.attempted]), encoding="utf-8")
    if not lives_on:
        os.kill(os.getpid(), signal.SIGKILL)


def _survive(trials: list[tuple[str, Fault, int]]) -> list[Life]:
    """Lives in which one process meets an error, of which both hear."""
    ranks, lives = Ranks.of_job(), []
    for directory, fault, victim in trials:
        life = Life(directory, ranks=ranks)
        life.live(FaultyFileSystem(LOCAL, *([fault] if ranks.rank == victim else [])))
        whole = replace(life, ranks=ALONE)
        for steps, wrong, complaints, loads in ranks.all_gather(
            (life.steps, life.wrong, life.complaints, life.loads)
        )[1:]:
            whole.steps += steps
            whole.wrong += wrong
            whole.complaints += complaints
            whole.loads += loads
        lives.append(whole)
    return lives
