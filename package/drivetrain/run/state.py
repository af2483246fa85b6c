"""The state of a run, as its loops, policies and callbacks read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from drivetrain.core.calendar import RunLength, Trigger
from drivetrain.distributed.stopping import Stopping
from drivetrain.engine.engine import Engine
from drivetrain.engine.weighting import StepResult
from drivetrain.run.clock import Clock
from drivetrain.run.metric_names import MetricNames
from drivetrain.run.save_errors import SaveErrors
from drivetrain.task.task import TaskModule

StartKind: TypeAlias = Literal["new", "auto", "own", "checkpoint", "other"]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a fit begins.

    Attributes:
        kind: "new" begins anew. "auto" begins from the newest good checkpoint of the run, or anew without
            one; for "own" it must have one. "checkpoint" is one of the run, and "other" one of another run.
        path: The run's directory or the checkpoint; "" if new.
    """

    kind: StartKind = "new"
    path: str = ""


@dataclass
class Evaluation:
    """The position of an evaluation or prediction.

    Attributes:
        loader: The loader's name; None if there is only one.
        batch: The batch, from 0.
        batches: The number of batches; None when unknown.
        values: The result, by full name, once it has ended.
        samples: The samples that this rank has read so far.
        seconds: The time that the loader's pass took, once it has ended.
        results: What each declared metric has returned, by its name in `metrics()`, once a loader's pass has
            ended; on rank 0.
        passes: The passes over the loaders, once all have ended; each has the values of its loader.
        is_placeholder: Whether this rank has no samples left, and runs a step on another rank's because the
            model is sharded. The result of that step is dropped.
        is_sanity_check: Whether it is the short validation before training, whose values are dropped.
    """

    loader: str | None = None
    batch: int = 0
    batches: int | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    results: Mapping[str, Any] = field(default_factory=dict)
    passes: Sequence[Evaluation] = ()
    is_placeholder: bool = False
    is_sanity_check: bool = False


@dataclass
class Triggers:
    """The intervals of logging and validation."""

    log: Trigger = field(default_factory=lambda: Trigger(None))
    validate: Trigger = field(default_factory=lambda: Trigger(None))


class RunState:
    """The part of a run without feeds, callbacks and loggers; `Run` documents its attributes."""

    def __init__(self, task: TaskModule, engine: Engine, stage: str, on_save_error: str = "raise") -> None:
        self.task = task
        self.engine = engine
        self.progress = engine.progress
        self.stage = stage
        self.is_main = engine.strategy.rank == 0
        self.names = MetricNames(task)
        self.metrics: dict[str, float] = {}
        self.logged: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.latest_at = -1
        self.result: StepResult | None = None
        self.window: Any = None
        self.batch: Any = None
        self.outputs: Any = None
        self.evaluation = Evaluation()
        self.clock = Clock()
        self.timing = {"data": 0.0, "compute": 0.0, "evaluation": 0.0, "save": 0.0}
        self.stop_reason: str | None = None
        self.postponed: str | None = None
        self.length = RunLength()
        self.stopping = Stopping()
        self.exception: BaseException | None = None
        self.failure: Exception | None = None
        self.validated = False
        self.in_turn = True
        self.sanity_batches: int | None = None
        self.last_checkpoint: str | None = None
        self.save_errors = SaveErrors(on_save_error, reports=self.is_main)
        self.milestones = self.reports = 0
        self.requests: dict[str, int] = {}
        self.agreed: frozenset[str] = frozenset()
        self.epoch_begun = 0
        self.saves_now = self.is_over = False
        self.unlogged: dict[str, Any] | None = None

    def stop(self, reason: str) -> None:
        """End the run after the current step; the first reason is kept.

        Before `Trainer(min_steps=)` the request waits: the run ends once they are made, with that reason. One
        rank may ask alone. All stop after the same step, the first that none of them has ended, with its
        reason. `stop_reason` stays None until they have agreed.
        """
        if self.length.is_early(self.progress):
            self.postponed = self.postponed or reason
        else:
            self.stop_now(reason)

    def stop_now(self, reason: str) -> None:
        """End the run as `stop` does, but before the minimum too: to go on would be pointless."""
        if self.stop_reason is None and self.stopping.shared:
            self.stopping.ask(reason)
        else:
            self.stop_reason = self.stop_reason or reason

    def fail(self, error: Exception) -> None:
        """End the run after the current step, save it, and then raise an error.

        For an error that all ranks share and that must not lose trained weights. The first error is kept.
        """
        if self.failure is None:
            self.failure = error
            self.stopping.restart_is_pointless = True
            self.stop_now(str(error))

    def report_progress(self) -> None:
        """Report that a hook which takes long is not stuck: `Trainer(hang_timeout=...)` counts anew."""
        self.reports += 1
