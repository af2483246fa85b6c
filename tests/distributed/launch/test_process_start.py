"""How old a process is."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from drivetrain.distributed.launch.process_start import process_age

PROGRAM = """
import time
time.sleep(0.5)
from drivetrain.distributed.launch.process_start import process_age
time.sleep(0.2)
print(process_age())
"""


def age_of_another() -> float:
    command = [sys.executable, "-c", PROGRAM]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)


def test_a_process_is_at_least_as_old_as_the_import() -> None:
    assert age_of_another() >= 0.2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_on_linux_the_time_before_the_import_counts_too() -> None:
    before = time.monotonic()
    age = age_of_another()
    assert 0.7 <= age <= time.monotonic() - before + 0.02  # of which the system counts hundredths


def test_it_grows() -> None:
    first = process_age()
    time.sleep(0.05)
    assert process_age() >= first + 0.05 - 0.02
