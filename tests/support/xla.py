"""Runs under XLA, each in a process of its own, since torch_xla decides once what its device stands for."""

import os
from collections.abc import Callable
from typing import Any

from drivetrain.callbacks import Callback
from drivetrain.strategies import STRATEGIES, Strategy
from drivetrain.testing import run_distributed
from drivetrain.trainer.trainer import Trainer

QUIET: dict[str, Any] = {"progress_bar": False, "checkpoint": False, "loggers": (), "max_epochs": 2}


def make(name: str, config: Any = None, devices: int = 1) -> Callable[[int], Strategy]:
    """What makes a strategy; in a job it opens XLA at once, before anything there computes gradients."""

    def made(world_size: int) -> Strategy:
        kind: Any = STRATEGIES[name]
        strategy: Strategy = kind(config, world_size=world_size)
        if "RANK" in os.environ:
            os.environ["CPU_NUM_DEVICES"] = str(devices)
            # Most of the time goes into making machine code of programs that run a few times.
            os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
            strategy.setup()
        return strategy

    return made


def trainer(name: str, config: Any = None, devices: int = 1, **options: Any) -> Trainer:
    return Trainer(strategy=make(name, config, devices)(1), **{**QUIET, **options})


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    (found,) = run_distributed(function, *arguments, world_size=1)
    return found


def counts() -> dict[str, int]:
    """What torch_xla has done in this process: programs compiled and run, and copies to the host."""
    from torch_xla.debug import metrics

    compiled, found = (metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
    copied = metrics.metric_data("TransferFromDeviceTime")
    return {"compiled": compiled, "run": compiled + found, "copied": copied[0] if copied else 0}


class Counts(Callback):  # notes what torch_xla did in each step, since the one before
    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._before: dict[str, int] = {}

    def on_step_start(self, run: Any) -> None:
        self._before = counts()

    def on_step_end(self, run: Any) -> None:
        self.steps.append({name: value - self._before[name] for name, value in counts().items()})
