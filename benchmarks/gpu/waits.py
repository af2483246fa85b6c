"""A fit in which whatever waits for the device is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivetrain import Callback
from peers.ours import Task, trainer
from turns import silenced
from workloads import Job


class NoWaiting(Callback):
    """From one log point to the next, whatever waits for the device is an error, the data's way there too.

    The last step is not watched: after it the fit reads its means, and there is no step that would end
    the watch.

    Args:
        every: Steps between log points.
        steps: Of the fit.
        set_mode: `torch.cuda.set_sync_debug_mode`.
        warm_up: Steps that may wait: what they compile and look up is done once.
    """

    def __init__(self, every: int, steps: int, set_mode: Callable[[str], Any], warm_up: int = 3) -> None:
        self.every = every
        self.steps = steps
        self.set_mode = set_mode
        self.warm_up = warm_up
        self.watched = 0

    def on_step_start(self, run: Any) -> None:
        """Watch a step that neither warms up nor logs nor is the last."""
        step = run.progress.steps + 1
        watched = self.warm_up < step < self.steps and step % self.every != 0
        self.watched += watched
        self.set_mode("error" if watched else "default")


def without_waiting(job: Job, set_mode: Callable[[str], Any], every: int = 10) -> int:
    """Run our loop with `NoWaiting`.

    Returns:
        How many steps were watched.

    Raises:
        RuntimeError: torch's, from the operation that waited.
    """
    watching = NoWaiting(every, job.count // job.accumulation, set_mode)
    options: dict[str, Any] = {"log_every": f"{every} steps", "loggers": ("csv",), "run_dir": job.directory}
    try:
        with silenced():
            trainer(job, callbacks=[watching], **options).fit(Task(job), job.data)
    finally:
        set_mode("default")
    return watching.watched
