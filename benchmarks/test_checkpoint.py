"""The contestants of `checkpoint.py` under pytest-benchmark: `pytest benchmarks --benchmark-only`.

Each saves, and loads, 0.1 GB. They are figures, not tests: nothing here asserts a time.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from contestants import CONTESTANTS, Contestant, gpt_like

ROUNDS = 5

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda contestant: contestant.name)
def test_save(benchmark: Any, contestant: Contestant, tmp_path: Path) -> None:
    """Time a save."""
    groups, path = gpt_like(0.1), tmp_path / "c"

    def clear() -> None:
        shutil.rmtree(path, ignore_errors=True)

    benchmark.group = "save"
    benchmark.pedantic(contestant.save, args=(path, groups), setup=clear, rounds=ROUNDS)


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda contestant: contestant.name)
def test_load(benchmark: Any, contestant: Contestant, tmp_path: Path) -> None:
    """Time a load."""
    groups, path = gpt_like(0.1), tmp_path / "c"
    contestant.save(path, groups)
    benchmark.group = "load"
    benchmark.pedantic(contestant.load, args=(path, groups), rounds=ROUNDS, warmup_rounds=1)
