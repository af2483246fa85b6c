"""How old a process is."""

from __future__ import annotations

import os
import sys
import time

import pytest

from drivetrain.distributed.launch import process_start
from drivetrain.distributed.launch.process_start import process_age, process_started


def test_the_time_before_the_import_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux; elsewhere only the time since the import is known. It never falls."""
    if sys.platform == "linux":
        ticks = process_started(os.getpid())
        assert ticks is not None
        monkeypatch.setattr(process_start, "process_started", lambda pid: ticks - 1000)
        assert process_age() >= 1000 / os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(process_start, "process_started", lambda pid: None)
    since = time.perf_counter() - process_start._IMPORTED
    assert since <= process_age() <= process_age()
