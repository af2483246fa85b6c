"""The campaigns at their full length: `make test-extended`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.campaigns import checkpoints, endurance, restarts

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(sys.platform != "linux", reason="needs signals, and finds processes by /proc"),
]


@pytest.mark.parametrize("seed", [0, 1])
def test_twelve_hundred_faults_and_real_kills_lose_no_checkpoint(seed: int, tmp_path: Path) -> None:
    assert checkpoints.main(["--seed", str(seed), "--directory", str(tmp_path)]) == 0


@pytest.mark.parametrize("remote", [False, True])
def test_two_thousand_faults_on_each_kind_of_storage_lose_no_checkpoint(remote: bool, tmp_path: Path) -> None:
    options = ["--faults", "2000", "--seed", "7", "--directory", str(tmp_path)]
    assert checkpoints.main([*options, *(["--remote"] if remote else [])]) == 0


def test_twenty_signals_under_each_strategy_change_no_weight(tmp_path: Path) -> None:
    assert restarts.main(["--signals", "20", "--directory", str(tmp_path)]) == 0


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_hundred_kills_lose_no_sample(tmp_path: Path) -> None:
    assert restarts.main(["--kills", "100", "--strategies", "ddp", "--directory", str(tmp_path)]) == 0


@pytest.mark.parametrize("options", [[], ["--workers", "2", "--asynchronous"]], ids=["", "workers"])
def test_long_runs_and_many_runs_do_not_grow(options: list[str]) -> None:
    assert endurance.main(options) == 0
