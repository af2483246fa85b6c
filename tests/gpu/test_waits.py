"""A steady step waits for the device as often as the table of tests/support/waits.py says, and no more."""

from pathlib import Path

import pytest
from tests.support.waits import CHANGE, ONE_RANK, WATCH, Row, waits, waits_of_own_loop, wrong

from drivetrain import CheckpointConfig


@pytest.mark.parametrize("name", ONE_RANK)
def test_steps_wait_as_often_as_the_table_says(name: str, device: str, tmp_path: Path) -> None:
    found = {name: waits(ONE_RANK[name], device, tmp_path)}
    assert not wrong(found, ONE_RANK, device)


def test_an_own_loop_does_not_wait(device: str) -> None:
    assert waits_of_own_loop(device) == 0
    if device != "cpu":  # where a tensor of the host is a number
        assert waits_of_own_loop(device, weights_on_device=True) == 0


def test_no_callback_waits_between_log_points(device: str, tmp_path: Path) -> None:
    policy = CheckpointConfig(every="20 steps", best=0, by=None)
    found = {
        name: waits(Row(), device, tmp_path / name, callbacks=[make()], checkpoint=policy, loggers="jsonl")
        for name, make in {**CHANGE, **WATCH}.items()
    }
    assert not {name: each for name, each in found.items() if each}
