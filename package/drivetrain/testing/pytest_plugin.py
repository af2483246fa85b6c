"""A pytest plugin with the fixture `benchmark_task`, over that of pytest-benchmark.

A `conftest.py` loads it with `pytest_plugins = ["drivetrain.testing.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from drivetrain.task.task import TaskModule
from drivetrain.testing.benchmark.turn import BLOCKS, BlockClock, Probe, measured, watched
from drivetrain.trainer.trainer import Trainer


@pytest.fixture
def benchmark_task(benchmark: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function of a task, its training data and a Trainer that times steps with pytest-benchmark.

    The statistics are those of a step. `extra_info` gets the values of a row of `drivetrain.benchmark` by
    name, such as samples_per_second, and the function returns them; none with `--benchmark-disable`. The
    measured time is a second, or `seconds`. It runs in this process, and so with one device.
    """

    def measure(
        task: TaskModule, data: Any, trainer: Trainer | None = None, *, seconds: float = 1.0
    ) -> dict[str, Any]:
        probe = Probe(clock := BlockClock(seconds))
        changed = watched(trainer or Trainer(), probe, str(tmp_path))
        with closing(changed.steps(task, data)) as steps:
            while not clock.size:
                next(steps)
            # The clock waits for the device at the end of each block, and ends the fit after the last.
            benchmark.pedantic(next, (steps,), rounds=BLOCKS - 2, iterations=clock.size, warmup_rounds=1)
        if clock.blocks:
            benchmark.extra_info.update(measured(changed, task, data, probe))
        return dict(benchmark.extra_info)

    return measure
