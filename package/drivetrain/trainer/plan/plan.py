"""The forecast of a fit without training: its length, rates, intervals, memory, and conflicts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch.nn.parameter import is_lazy

from drivetrain.callbacks.summary import sized
from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.random_streams import preserved
from drivetrain.core.stages import at_start
from drivetrain.core.totals import Totals
from drivetrain.data import evaluation_sources
from drivetrain.run.settings import RunSettings, stages_of
from drivetrain.task.task import known_fit
from drivetrain.trainer.assembly import check_task, checked_fit_data, every, planned_totals, preparing
from drivetrain.trainer.data_objects import begun
from drivetrain.trainer.feeds import evaluation_batch_size
from drivetrain.trainer.plan.conflicts import (
    interval_conflicts,
    length_conflicts,
    module_conflicts,
    schedule_conflicts,
    validation_conflicts,
)
from drivetrain.trainer.plan.counts import Epoch, Firings, and_at_the_end, firings
from drivetrain.trainer.plan.optimizers import Built, Rate


@dataclass(frozen=True)
class Plan:
    """The forecast of a fit; its text is a table. None means unknown beforehand.

    Attributes:
        task: The task's class.
        updates: Updates in all; with `max_time` the most that there can be.
        updates_per_epoch: Updates in an epoch.
        unknown: Why a length is not known or not certain, or "".
        micro_batches_per_update: Micro-batches in a full window, at the start of the run.
        samples_per_update: Samples in a full window, of all processes, at the start of the run: the effective
            batch.
        stages: Arguments whose number changes during the run, with its stages.
        last_window: Micro-batches and samples in an epoch's last window.
        rates: By the names that a run logs them under; see `Run.learning_rates`.
        validation: When it validates.
        logging: When it logs.
        saving: When it saves, by the first policy; the end of the run counts.
        device: Where the model runs.
        strategy: The strategy's name, with the stage under "deepspeed".
        processes: How many processes train together.
        parameters: The number of parameters.
        trainable: The number of those that are trained.
        memory: Bytes of "parameters", "gradients" and "optimizer" (its state), of the whole model also where
            "fsdp" gives each process a share.
        warnings: Conflicts, each with what to do about it.
        also_saving: When it saves by the other policies.
    """

    task: str
    updates: int | None
    updates_per_epoch: int | None
    unknown: str
    micro_batches_per_update: int
    samples_per_update: int | None
    stages: dict[str, str]
    last_window: tuple[int | None, int | None]
    rates: dict[str, Rate]
    validation: Firings
    logging: Firings
    saving: Firings
    device: str
    strategy: str
    processes: int
    parameters: int
    trainable: int
    memory: dict[str, int | None]
    warnings: tuple[str, ...]
    also_saving: tuple[Firings, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, with lists in place of tuples."""
        plan = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plan.items()}

    def __str__(self) -> str:
        last, rest = self.last_window
        sizes = [each for each in self.memory.values() if each is not None]
        complete = len(sizes) == len(self.memory)
        first = ", at the start" if self.stages else ""
        several = f", {self.processes} processes" if self.processes > 1 else ""
        rows = [
            ("updates", f"{_number(self.updates)} in all, {_number(self.updates_per_epoch)} per epoch"),
            ("", self.unknown),
            ("effective batch", f"{_number(self.samples_per_update)} samples per update{first}"),
            ("", f"in {self.micro_batches_per_update} batch(es) of the data per update"),
            *((f"changes: {name}", stages) for name, stages in self.stages.items()),
            ("last window", "" if self.stages else f"{_number(last)} batch(es), {_number(rest)} samples"),
            *((name, _rate_text(rate)) for name, rate in self.rates.items()),
            ("validates every", str(self.validation)),
            ("logs every", str(self.logging)),
            ("saves every", str(self.saving)),
            *(("", str(each)) for each in self.also_saving),
            ("device", f"{self.device}, strategy {self.strategy}{several}"),
            ("parameters", f"{self.parameters:,}, trainable {self.trainable:,}"),
            *((f"memory: {what}", _memory_text(size)) for what, size in self.memory.items()),
            ("memory: in all", _memory_text(sum(sizes) if complete else None)),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name.ljust(width)}  {text}" for name, text in rows if text]
        return "\n".join([f"plan of {self.task}", *lines, *(f"warning: {each}" for each in self.warnings)])


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _rate_text(rate: Rate) -> str:
    end = "unknown" if rate.end is None else f"{rate.end:.4g}"
    peak = "unknown" if rate.peak is None else f"{rate.peak:.4g}"
    update = "" if rate.peak_update is None else f" (update {rate.peak_update:,})"
    return f"{rate.start:.4g} at the start, {peak} at its peak{update}, {end} at the end"


def _memory_text(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size:,} bytes" + (f" ({sized(size)})" if size >= 1000 else "")


def make_plan(settings: RunSettings, task: Any, train_data: Any, validation_data: Any = None) -> Plan:
    """Return the forecast of `settings.fit` with this task and data.

    Nothing is trained, moved or written, and no sample is fetched; the task, the data and the random streams
    stay as they are. The optimizers are built and stepped once on copies of the parameters that have shapes
    and dtypes but no values (torch's "meta" device), which gives the size of their state.

    Raises:
        ConfigError: Arguments, task and data do not fit together, as in `fit`.
        DataError: The data is empty or of an unknown kind.
    """
    with preserved(), begun("fit", task := check_task(task), train_data, validation_data):
        train_data, validation_data = checked_fit_data(settings, train_data, validation_data)
        epoch = Epoch(settings, task, train_data)
        strategy = settings.select_strategy()
        totals = planned_totals(settings, epoch.feed, strategy.world_size)
        validates = validation_data is not None
        if validates:  # for its errors: an empty loader, or one without a batch size
            size = evaluation_batch_size(settings)
            evaluation_sources(validation_data, "validation", settings.seed, batch_size=size)
        with known_fit(task, totals), preparing((*task.run_callbacks("train"), *settings.callbacks), task):
            built = Built(settings, task, totals)
        policies = chosen_policies(settings.checkpoint) or (CheckpointConfig(),) * bool(settings.checkpoint)
        save_every = dict.fromkeys(each.interval for each in policies)
        validate_every = every(settings.validate_every) if validates else None
        validation = firings(validate_every, epoch, totals, begins=every(settings.validate_from))
        resume_points = [firings(each, epoch, totals) for each in save_every] or [
            firings(None, epoch, totals)
        ]
        parameters = [each for each in built.module.parameters() if not is_lazy(each)]
        plan = Plan(
            task=type(task).__name__,
            updates=totals.updates,
            updates_per_epoch=totals.updates_per_epoch,
            unknown=_why_unknown(epoch, totals),
            micro_batches_per_update=at_start(settings.gradient_accumulation_steps),
            samples_per_update=epoch.window(0),
            stages={name: str(each) for name, each in stages_of(settings).items()},
            last_window=epoch.last_window,
            rates=built.rates(totals.updates),
            validation=validation,
            logging=firings(every(settings.log_every), epoch, totals, first=settings.log_first_step),
            saving=and_at_the_end(resume_points[0], totals.updates) if policies else resume_points[0],
            device=str(strategy.device),
            strategy=strategy.title,
            processes=strategy.world_size,
            parameters=sum(each.numel() for each in parameters),
            trainable=sum(each.numel() for each in parameters if each.requires_grad),
            memory=built.memory(),
            warnings=(),
            also_saving=tuple(each for each in resume_points[1:] if each.every is not None),
        )
        conflicts = (
            *length_conflicts(settings, epoch, totals),
            *schedule_conflicts(built, totals),
            *interval_conflicts(settings, plan.updates, plan.validation, plan.logging, resume_points),
            *validation_conflicts(settings, task, built, validates and validation.times != 0),
            *module_conflicts(task, epoch, built),
        )
    return dataclasses.replace(plan, warnings=conflicts)


def _why_unknown(epoch: Epoch, totals: Totals) -> str:
    reasons = []
    if epoch.batches is None:
        reasons.append("the training data has no length")
    elif not epoch.exact:
        reasons.append("the length is what the training data says of itself")
    if totals.updates_in is not None:
        reasons.append("epochs differ in their updates")
    if totals.max_seconds is not None:
        reasons.append(f"max_time ends the run after {totals.max_seconds:g} seconds at the latest")
    return "; ".join(reasons)
