"""The forecast of a fit without training: its length, rates, intervals, memory, and conflicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.core.calendar import RunLength, Trigger
from drivetrain.core.errors import ConfigError, shown
from drivetrain.core.int_schedule import at_start
from drivetrain.core.messages import columns, sized
from drivetrain.core.notebook.html import html_table, sparkline
from drivetrain.core.types import Batch
from drivetrain.data import evaluation_sources
from drivetrain.run.settings import RunSettings, known_accumulation, scheduled_numbers
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Memory
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.task import TaskModule, known_fit, train_loaded
from drivetrain.task.without_trace import without_trace
from drivetrain.trainer.assembly import (
    check_task,
    checked_fit_data,
    make_triggers,
    modify_task,
    planned_length,
    with_callbacks_of,
)
from drivetrain.trainer.data_objects import begun
from drivetrain.trainer.feeds import evaluation_batch_size, with_accumulation
from drivetrain.trainer.plan.conflicts import conflicts
from drivetrain.trainer.plan.counts import Epoch, Firings, and_at_the_end, firings
from drivetrain.trainer.plan.fake_step import Collective, FakeStep, fake_step
from drivetrain.trainer.plan.memory import checkpoint_size, example_batch, tried
from drivetrain.trainer.plan.optimizers import Rate, build


@dataclass(frozen=True, repr=False)
class Plan:
    """The forecast of a fit; its text is a table. None means unknown beforehand.

    Attributes:
        task: The task's class.
        steps: Steps in all; with `max_time` the most that there can be.
        steps_per_epoch: Steps in an epoch.
        unknown: Why a length is not known or not certain, or "".
        micro_batches_per_step: Micro-batches in a full window, at the start of the run.
        samples_per_step: Samples in a full window, of all processes, at the start of the run: the effective
            batch.
        scheduled: Arguments whose number changes during the run, with the numbers by points of the run.
        last_window: Micro-batches and samples in an epoch's last window.
        rates: The learning rates and other scheduled settings, by the names that a run logs them under.
        validation: When it validates.
        logging: When it logs.
        saving: When it saves, by the first policy; the end of the run counts.
        device: Where the model runs.
        strategy: The strategy's name, with the stage under "deepspeed".
        processes: How many processes train together.
        parameters: The number of parameters.
        trainable: The number of trained parameters.
        memory: Bytes that the first process holds; its shards are the largest. "parameters", "gradients" and
            "optimizer" (its state) are always there. "gathered" are weights and gradients that are whole for
            a while, and the strategy's buffers, at the peak of a step. "activations" are what forward keeps
            for one micro-batch, with the batch. "temporary" is other memory at the peak: the model's outputs,
            such as logits, recomputed activations, gradients of activations, and tensors of the optimizer's
            step. Tensors inside a kernel are not counted.
        warnings: Conflicts, each with what to do about it.
        also_saving: When it saves by the other policies.
        precision: The precision, with the dtypes that differ by strategy.
        offloaded: Parts of `memory` that are in the host's memory.
        memory_unknown: Why "activations" and "temporary" are not known, or "".
        checkpoint: Bytes of the tensors of a checkpoint; None if unknown, or if the fit saves none.
        tokens_per_step: Tokens in a full window of all processes, if the task counts them; estimated from the
            first sample.
        tokens: Tokens in all, estimated in the same way.
        peak: The most bytes at one time in a step, without what is offloaded. The parts of `memory` may be
            more together: at the peak of a forward there are no gradients yet.
        collectives: The exchanges of tensors in a step, in order; None where `memory_unknown` has the reason,
            or under strategies with a library of their own. The few bytes of counts that ranks exchange on
            the host are not there.
        flops: Floating-point operations of a step in each process, as MFU counts them: those of forward and
            backward, without recomputation. None if they are not known.
        host_memory: Bytes that the processes of a machine hold in the host's memory: offloaded parts, the
            copy of what each process saves asynchronously, and the batches of workers. Programs, libraries
            and data sets are not counted.
    """

    task: str
    steps: int | None
    steps_per_epoch: int | None
    unknown: str
    micro_batches_per_step: int
    samples_per_step: int | None
    scheduled: dict[str, str]
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
    precision: str = ""
    offloaded: tuple[str, ...] = ()
    memory_unknown: str = ""
    checkpoint: int | None = None
    tokens_per_step: int | None = None
    tokens: int | None = None
    peak: int | None = None
    collectives: tuple[Collective, ...] | None = None
    flops: int | None = None
    host_memory: int = 0

    def hours(
        self,
        *,
        steps_per_second: float | None = None,
        tokens_per_second: float | None = None,
        flops_per_second: float | None = None,
    ) -> float | None:
        """Return how long the steps take at one of these rates; None where the plan lacks a number for it.

        Validation and saving are not counted.

        Args:
            steps_per_second: Steps of all processes together.
            tokens_per_second: Tokens of all processes together.
            flops_per_second: What one process reaches: the share of its peak times the peak, such as
                `0.4 * 989e12`.

        Raises:
            ConfigError: Not one rate, or one that is not above 0.
        """
        steps = self.steps
        if steps is None and self.tokens and self.tokens_per_step:  # `max_tokens` is the run's limit
            steps = -(-self.tokens // self.tokens_per_step)
        works = (steps, self.tokens, None if self.flops is None else self.flops * (steps or 0))
        rates = (steps_per_second, tokens_per_second, flops_per_second)
        given = [(work, rate) for work, rate in zip(works, rates, strict=True) if rate is not None]
        if len(given) != 1 or given[0][1] <= 0:
            raise ConfigError(
                "hours takes one rate above 0: steps_per_second, tokens_per_second or flops_per_second"
            )
        ((work, rate),) = given
        return None if work is None or steps is None else work / rate / 3600

    def to_json(self) -> dict[str, Any]:
        """Return all fields by name, with lists in place of tuples."""
        plan = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plan.items()}

    def listed(self) -> str:
        """Return the collectives of a step in order, a line for each; empty if there are none."""
        rows = [
            (str(number), each.kind, f"{each.ranks} processes", f"{each.bytes:,} bytes of {each.dtype}")
            for number, each in enumerate(self.collectives or (), 1)
        ]
        return "\n".join(columns(rows))

    def __repr__(self) -> str:
        """Return one short line: a prompt shows it below the lines that `Trainer.plan` prints."""
        return f"<Plan of {self.task}: {_number(self.steps)} steps>"

    def _repr_html_(self) -> str:
        """Return the plan as a table with the curves of the rates, which a notebook shows."""
        curves = [(f"curve of {name}", sparkline(each.curve)) for name, each in self.rates.items()]
        warned = [("warning", each) for each in self.warnings]
        return html_table((f"plan of {self.task}", ""), [*self._rows(), *curves, *warned])

    def __str__(self) -> str:
        lines = [f"  {each}" for each in columns(self._rows())]
        warned = (f"warning: {each}" for each in self.warnings)
        return shown("\n".join([f"plan of {self.task}", *lines, *warned]))

    def _rows(self) -> list[tuple[str, str]]:
        last, rest = self.last_window
        first = ", at the start" if self.scheduled else ""
        several = f", {self.processes} processes" if self.processes > 1 else ""
        rows = [
            ("steps", f"{_number(self.steps)} in all, {_number(self.steps_per_epoch)} per epoch"),
            ("", self.unknown),
            ("effective batch", f"{_number(self.samples_per_step)} samples per step{first}"),
            ("", f"in {self.micro_batches_per_step} batch(es) of the data per step"),
            *((f"changes: {name}", numbers) for name, numbers in self.scheduled.items()),
            ("tokens", self._token_text()),
            ("last window", "" if self.scheduled else f"{_number(last)} batch(es), {_number(rest)} samples"),
            *((name, _rate_text(rate)) for name, rate in self.rates.items()),
            ("validates every", str(self.validation)),
            ("logs every", str(self.logging)),
            ("saves every", str(self.saving)),
            *(("", str(each)) for each in self.also_saving),
            ("checkpoint", "" if self.checkpoint is None else f"{_memory_text(self.checkpoint)} each"),
            ("device", f"{self.device}, strategy {self.strategy}{several}"),
            ("precision", self.precision),
            ("parameters", f"{self.parameters:,}, trainable {self.trainable:,}"),
            *self._memory_rows(),
            ("memory: host", f"{_memory_text(self.host_memory)} on each machine" * bool(self.host_memory)),
            *self._exchange_rows(),
            ("step: computes", "" if self.flops is None else f"{self.flops:.4g} FLOP in each process"),
        ]
        return [(name, text) for name, text in rows if text]

    def _token_text(self) -> str:
        if self.tokens_per_step is None:
            return ""
        return f"{self.tokens_per_step:,} per step, {_number(self.tokens)} in all, by the first sample"

    def _memory_rows(self) -> list[tuple[str, str]]:
        """Return the rows of what one process holds; unknown parts are left out of the sums, which say so."""
        rows = []
        for what, size in self.memory.items():
            where = ", in the host's memory" if what in self.offloaded and size is not None else ""
            reason = f": {self.memory_unknown}" if size is None and what == "activations" else ""
            rows.append((f"memory: {what}", _memory_text(size) + where + reason))
        whose = "" if self.processes == 1 else "in each process "
        if self.peak is not None:
            return [*rows, ("memory: in all", f"{whose}{_memory_text(self.peak)} at the peak of a step")]
        known = _memory_text(_known(self.memory, self.offloaded))
        return [*rows, ("memory: in all", f"{whose}at least {known}")]

    def _exchange_rows(self) -> list[tuple[str, str]]:
        """Return a row for each kind of collective, and one of all that a process sends."""
        if not self.collectives:
            return []
        kinds: dict[tuple[str, int, str], list[int]] = {}
        for each in self.collectives:
            kinds.setdefault((each.kind, each.ranks, each.dtype), []).append(each.bytes)
        rows = [
            (f"step: {kind}", f"{len(sizes)} over {ranks} processes, {sized(sum(sizes))} of {dtype}")
            for (kind, ranks, dtype), sizes in kinds.items()
        ]
        return [
            *rows,
            ("step: sent", f"by each process {sized(sum(each.sent for each in self.collectives))}"),
        ]


_OF_A_STEP = ("activations", "temporary")

_AHEAD = 2
"""The batches that torch's loader lets each worker make in advance."""


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _rate_text(rate: Rate) -> str:
    end = "unknown" if rate.end is None else f"{rate.end:.4g}"
    peak = "unknown" if rate.peak is None else f"{rate.peak:.4g}"
    step = "" if rate.peak_step is None else f" (step {rate.peak_step:,})"
    return f"{rate.start:.4g} at the start, {peak} at its peak{step}, {end} at the end"


def _bytes(batch: Batch) -> int:
    return sum(each.nbytes for each in tree_leaves(batch) if isinstance(each, Tensor))


def _memory_text(size: int | None) -> str:
    if size is None:
        return "unknown"
    return f"{size:,} bytes" + (f" ({sized(size)})" if size >= 1000 else "")


def make_plan(settings: RunSettings, task: Any, train_data: Any, validation_data: Any = None) -> Plan:
    """Return the forecast of `settings.fit` with this task and data.

    Nothing is trained, moved or written; the task, the data and the random streams stay as they are. At most
    the first sample is fetched, and none from a stream. Copies of it make a micro-batch, and two steps of the
    first process without values and without the other processes give its memory and its collectives; see
    `fake_step`.
    """
    given = check_task(task), train_data, validation_data
    with without_trace(*given), begun("fit", *given):
        settings = with_callbacks_of(task, settings)
        train_data, validation_data = checked_fit_data(settings, train_data, validation_data)
        epoch = Epoch(settings, task, train_data)
        settings = with_accumulation(settings, epoch.feed)
        strategy = settings.select_strategy()
        length = planned_length(settings, epoch.feed, strategy.world_size)
        if validation_data is not None:  # for its errors: an empty loader, or one without a batch size
            size = evaluation_batch_size(settings)
            evaluation_sources(validation_data, "validation", settings.seed, batch_size=size)
        with known_fit(task, length), modify_task(settings.callbacks, task):
            check_values(task, strategy.name, meta=True)
            built = build(settings, task, length)
            train_loaded(task)
            use, example = _use(settings, strategy, task, train_data, length)
            points = _points(settings, epoch, length, validation_data is not None)
            found = conflicts(settings, task, strategy, epoch, length, built, points, example)
            return Plan(
                task=type(task).__name__,
                steps=length.steps,
                steps_per_epoch=length.steps_per_epoch,
                unknown=_why_unknown(epoch, length),
                micro_batches_per_step=at_start(known_accumulation(settings)),
                samples_per_step=epoch.window(0),
                scheduled={name: str(each) for name, each in scheduled_numbers(settings).items()},
                last_window=epoch.last_window,
                rates=built.rates(length.calendar.whole),
                **points,
                device=str(strategy.device),
                strategy=str(strategy),
                processes=strategy.world_size,
                parameters=sum(each.numel() for each in task.parameters()),
                trainable=sum(each.numel() for each in task.parameters() if each.requires_grad),
                warnings=tuple(found),
                **use,
            )


def _points(settings: RunSettings, epoch: Epoch, length: RunLength, validates: bool) -> dict[str, Any]:
    """Return the fields of a plan that are the steps at which something is due."""
    policies = chosen_policies(settings.checkpoint) or (CheckpointConfig(),) * bool(settings.checkpoint)
    triggers = make_triggers(settings, length.calendar, validates)
    every = dict.fromkeys(each.interval for each in policies) or (None,)
    first, *others = (firings(Trigger(each, length.calendar), epoch, length) for each in every)
    return {
        "validation": firings(triggers.validate, epoch, length),
        "logging": firings(triggers.log, epoch, length),
        "saving": and_at_the_end(first, length.steps) if policies else first,
        "also_saving": tuple(each for each in others if each.every is not None),
    }


def _use(
    settings: RunSettings, strategy: Strategy, task: TaskModule, data: Any, length: RunLength
) -> tuple[dict[str, Any], Batch]:
    """Return the fields of a plan that are the use of one process, and a micro-batch; None if unknown."""
    accumulation = at_start(known_accumulation(settings))
    local_size = max(1, strategy.world_size // settings.num_nodes)
    precision = as_precision(settings.precision)
    held = strategy.memory(task, precision, local_size)
    nothing: tuple[Batch, int | None] = (None, None)
    (batch, tokens), why = tried(example_batch, nothing, settings, task, data)
    none = FakeStep({}, False)
    step, failed = tried(fake_step, none, settings, strategy, task, batch, accumulation, length, held)
    memory = _memory(step, strategy, held)
    offloaded = tuple(each for each in memory if held and each in held.offloaded)
    peak = _peak(step, memory, offloaded)
    tokens = tokens and tokens * accumulation * strategy.data_size
    fields = {
        "precision": _precision_text(precision, None if held is None else held.forward_dtype),
        "memory": memory,
        "offloaded": offloaded,
        "memory_unknown": why or failed or step.unknown,
        "checkpoint": checkpoint_size(settings, task, step.states.get("saved")),
        "tokens_per_step": tokens,
        "tokens": tokens and (length.max_tokens if length.steps is None else tokens * length.steps),
        "peak": peak,
        "collectives": step.collectives,
        "flops": step.flops,
        "host_memory": local_size * _hosted(settings, memory, offloaded, data, batch),
    }
    return fields, batch


def _hosted(
    settings: RunSettings, memory: Mapping[str, int | None], offloaded: Sequence[str], data: Any, batch: Batch
) -> int:
    """Return the bytes of one process on the host."""
    chosen = chosen_policies(settings.checkpoint)
    copied = settings.checkpoint == "async" or any(each.asynchronous for each in chosen)
    parts = (*offloaded, *("parameters", "optimizer") * copied)
    workers = data.num_workers if isinstance(data, DataLoader) else settings.num_workers
    return sum(memory[each] or 0 for each in parts) + workers * _AHEAD * _bytes(batch)


def _memory(step: FakeStep, strategy: Strategy, held: Memory | None) -> dict[str, int | None]:
    """Return the bytes of states in one process; those of the step are not known yet."""
    memory = {each: step.states.get(each) for each in ("parameters", "gradients", "optimizer")}
    if not step.is_own:  # one process has run for all
        for name, size in memory.items():
            share = None if held is None else held.share if name in held.divided else 1.0
            memory[name] = None if size is None or share is None else round(size * share)
    if strategy.sharded or strategy.world_size > 1:
        memory["gathered"] = None if step.is_own or held is None else held.gathered
    return memory | dict.fromkeys(_OF_A_STEP)


def _peak(step: FakeStep, memory: dict[str, int | None], offloaded: Sequence[str]) -> int | None:
    """Add what a step has used to the memory of a process; return its peak."""
    if step.kept is None:
        return None
    memory["activations"] = step.kept
    if step.is_own:
        if "gathered" in memory:
            memory["gathered"] = step.at_peak.get("gathered", 0)
        # The optimizer's step is made where its state is.
        on_host = {*offloaded, "step"} if offloaded else ()
        peak = sum(size for kind, size in step.at_peak.items() if kind not in on_host)
        memory["temporary"] = max(0, peak - _known(memory, offloaded))
        return peak
    temporary = step.at_peak.get("activations", 0) + step.at_peak.get("step", 0) - step.kept
    memory["temporary"] = max(0, temporary)
    return None if None in memory.values() else _known(memory, offloaded)


def _known(memory: Mapping[str, int | None], offloaded: Sequence[str]) -> int:
    """Return the bytes that are known, without those that are offloaded."""
    return sum(size or 0 for part, size in memory.items() if part not in offloaded)


def _precision_text(precision: Precision, gathered: torch.dtype | None) -> str:
    """Return the precision's dtypes, and what the strategy computes in fewer bits than one process does."""
    dtypes = precision.dtypes
    text = f"{precision.name}: weights in {dtypes.storage}, products in {dtypes.compute}"
    if gathered is not None:
        text += ", and so are embeddings and the residual stream, by the weights"
    return text


def _why_unknown(epoch: Epoch, length: RunLength) -> str:
    reasons = []
    if epoch.batches is None:
        reasons.append("the training data has no length")
    elif not epoch.exact:
        reasons.append("the length is what the training data says of itself")
    if not length.calendar.is_planned:
        reasons.append("gradient_accumulation_steps follows what is read")
    elif length.calendar.varies and length.calendar.length is not None:
        reasons.append("epochs have different numbers of steps")
    if length.max_seconds is not None:
        reasons.append(f"max_time ends the run after {length.max_seconds:g} seconds at the latest")
    if length.max_tokens is not None:
        reasons.append(f"max_tokens ends the run at {length.max_tokens:,} tokens")
    return "; ".join(reasons)
