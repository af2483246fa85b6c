"""Real SIGKILLs: a process that saves as fast as it can is killed at any moment, again and again."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tests.campaigns.life import Life, save
from tests.campaigns.trials import Outcome, outcome_of
from tests.support.messages import heard

from drivetrain.checkpoint.saving.manager import CheckpointManager
from drivetrain.checkpoint.storage.filesystem import LOCAL

EARLIEST, LATEST = 0.002, 0.06
"""Seconds from the start of the work to the kill."""


def run_kills(number: int, seed: int, directory: str) -> list[Outcome]:
    """Kill processes that save, and check after each what is there.

    Args:
        number: Of kills; 0 too where there is no SIGKILL.
        seed: Of the moments; what a process is doing then differs from time to time all the same.
        directory: One that does not exist yet; all processes save there, one after the other.
    """
    if not hasattr(signal, "SIGKILL"):
        return []
    chance = random.Random(seed)
    updates, started = Path(f"{directory}.updates"), Path(f"{directory}.started")
    life = Life(directory)
    outcomes = []
    for each in range(number):
        life = Life(directory, each % 2 == 1, acknowledged=life.acknowledged)
        try:
            code = _killed(life, updates, started, chance.uniform(EARLIEST, LATEST))
            if code != -signal.SIGKILL:
                life.complaints.append(f"the process ended by itself, with {code}")
            told = updates.read_text(encoding="ascii").split() if updates.exists() else []
            life.acknowledged = max(life.acknowledged, *map(int, told[-1:]), 0)
            life.attempted = life.acknowledged + 1
            life.end(LOCAL)
            life.acknowledged += 1  # the last process has saved, too
        except Exception:  # a trial that breaks is a finding, and the others are to go on
            life.complaints.append(f"it broke:\n{traceback.format_exc()}")
        outcome = outcome_of(life, f"kill {each + 1} of --kills {number} --seed {seed}")
        outcome.struck = ["SIGKILL"]
        outcomes.append(outcome)
    return outcomes


def _killed(life: Life, updates: Path, started: Path, delay: float) -> int | None:
    """Let a process work for a while and kill it; its exit code."""
    started.unlink(missing_ok=True)
    # Forked where that is safe, because a new interpreter would take seconds to import torch.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_work, args=(life, str(updates), str(started)))
    process.start()
    while process.is_alive() and not started.exists():
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()
    code: int | None = process.exitcode
    process.close()
    return code


def _work(life: Life, updates: str, started: str) -> None:
    """Save without end, and write down what is surely saved."""
    torch.set_num_threads(1)
    told = os.open(updates, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Path(started).touch()
    manager = CheckpointManager(life.directory, life.config)
    with heard() as warnings:
        update = life.check_load(manager.load_latest())
    assert not warnings, "after a kill there is nothing to warn of"
    assert not life.wrong, life.wrong
    while True:
        update += 1
        save(manager, update)
        os.write(told, b"%d\n" % update)
