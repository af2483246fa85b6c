"""The campaigns: a tenth of each every night, and their full length with `make test-extended`."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.campaigns import checkpoints, endurance, restarts
from tests.support.messages import unconfigured

from drivetrain.run.ledger_report import read_ledger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs signals, and finds processes by /proc")
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def tiers(nightly: Any, *extended: Any) -> list[Any]:
    return [
        pytest.param(each, marks=pytest.mark.extended if number else pytest.mark.nightly, id=str(each))
        for number, each in enumerate((nightly, *extended))
    ]


@pytest.mark.parametrize(
    "options",
    tiers(
        "--faults 120 --kills 4 --shards 3",
        "--faults 1200 --kills 40 --shards 12 --seed 0",
        "--faults 1200 --kills 40 --shards 12 --seed 1",
        "--faults 2000 --kills 0 --shards 0 --seed 7",
        "--faults 2000 --kills 0 --shards 0 --seed 7 --remote",
    ),
)
def test_faults_and_kills_lose_no_checkpoint(options: str, tmp_path: Path) -> None:
    assert checkpoints.main([*options.split(), "--directory", str(tmp_path)]) == 0


@pytest.mark.parametrize("options", tiers("--signals 2 --strategies single", "--signals 20"))
def test_signals_at_random_moments_change_no_weight(options: str, tmp_path: Path) -> None:
    assert restarts.main([*options.split(), "--seed", "1", "--directory", str(tmp_path)]) == 0


@needs_gloo
@pytest.mark.parametrize("number", tiers(5, 100))
def test_kills_lose_no_sample_and_no_second_of_the_ledger(number: int, tmp_path: Path) -> None:
    score = restarts.run_kills(number, 0, tmp_path, "ddp")
    assert score.failures == [], str(score)
    assert score.faults.total() == number
    ledger = read_ledger(tmp_path / "kills-ddp-0" / "run")
    assert (ledger.attempts[0].ended, ledger.attempts[-1].ended) == (None, "finished")
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall, rel=0.01)
    assert ledger.seconds["waiting"] > 0


LONG = "--steps 5000 --fits 20"
MANY = tiers("--steps 500 --fits 5", LONG, f"{LONG} --workers 2", f"{LONG} --asynchronous")


@pytest.mark.parametrize("options", MANY)
def test_long_runs_and_many_runs_do_not_grow(options: str) -> None:
    with unconfigured():  # pytest keeps each message until the test has ended
        assert endurance.main(options.split()) == 0
