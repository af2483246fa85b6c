"""A program learns its rank, and prepares something once, whoever has started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import drivetrain
from drivetrain.testing.distributed import run_distributed


def test_a_program_of_one_process_is_rank_0_of_1() -> None:
    assert (drivetrain.rank(), drivetrain.local_rank(), drivetrain.world_size()) == (0, 0, 1)


def test_what_a_launcher_says_counts_before_there_is_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (drivetrain.rank(), drivetrain.local_rank(), drivetrain.world_size()) == (3, 1, 4)


def asked() -> Any:
    return drivetrain.rank(), drivetrain.world_size()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_process_group_tells_it() -> None:
    assert run_distributed(asked) == [(0, 2), (1, 2)]


PROGRAM = """
import sys, time, pathlib, drivetrain
path = pathlib.Path("data/words.txt")
with drivetrain.one_at_a_time(path):
    if not path.exists():
        path.write_text("half")
        time.sleep(0.3)
        path.write_text("whole")
        print("made")
    else:
        print("found", path.read_text())
"""


def test_what_is_made_once_is_found_by_the_others() -> None:
    several = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = [each.communicate(timeout=240)[0].strip() for each in several]
    assert sorted(said) == ["found whole", "found whole", "made"]
    assert Path("data/words.txt.lock").exists()


def test_one_that_failed_lets_the_next_in() -> None:
    with pytest.raises(ValueError, match="planted"), drivetrain.one_at_a_time("made"):
        raise ValueError("planted")
    with drivetrain.one_at_a_time("made"):
        pass
