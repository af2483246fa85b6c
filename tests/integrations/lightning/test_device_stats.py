"""The use of the machine beside Lightning's callback of the same kind."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.accelerators.cpu import get_cpu_stats
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import DeviceStats

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]


def test_the_values_of_the_host_are_lightnings() -> None:
    metrics = quiet(max_steps=1, callbacks=[DeviceStats()]).fit(Regression(), pairs()).metrics
    theirs = get_cpu_stats()
    assert metrics["device/memory_percent"] == pytest.approx(theirs["cpu_vm_percent"], abs=10)
    assert metrics["device/swap_percent"] == pytest.approx(theirs["cpu_swap_percent"], abs=5)
    assert 0 <= metrics["device/cpu_percent"] <= 100
    assert 0 <= theirs["cpu_percent"] <= 100
