"""Builds the objects of a run from a Trainer's arguments."""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain import callbacks as built_in
from drivetrain.callbacks.monitored_metric import MonitoredMetric
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.checkpoint.weights.frozen import (
    FrozenParameters,
    check_left_out,
    check_storable,
    fingerprints,
)
from drivetrain.checkpoint.weights.module_state import load_module_state
from drivetrain.core.calendar import Calendar, RunLength, Trigger
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import odd_kind
from drivetrain.core.int_schedule import at_start
from drivetrain.core.intervals import Every
from drivetrain.core.random_streams import preserved
from drivetrain.core.synonyms import check_task_names, foreign
from drivetrain.core.validation import duration, token_count
from drivetrain.data import Feed, map_tensors
from drivetrain.data.consistency import check_data
from drivetrain.data.reading import check_evaluation_size, check_settings_used
from drivetrain.data.split_source import AlreadySplit
from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.failure.location import thread_location
from drivetrain.distributed.launch.environment import may_start_again
from drivetrain.engine.engine import Engine
from drivetrain.engine.metrics.declared import DeclaredMetrics, declared_by, takes_loader
from drivetrain.engine.rank_consistency import check_same_call, check_same_optimizers
from drivetrain.loggers.base import build_loggers
from drivetrain.run.hooks import HOOKS
from drivetrain.run.ledger import fit_began
from drivetrain.run.messages import is_probe
from drivetrain.run.run import Run
from drivetrain.run.setting_checks import check_outputs, checked_callbacks
from drivetrain.run.settings import RunSettings, check_strategy_settings, has_run_dir, same_on_all_ranks
from drivetrain.run.state import Start, Triggers
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.transforms.compile import as_compile
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule, check_constructed, known_fit, train_loaded
from drivetrain.trainer.data_objects import DataObject, begun, fit_data, pick_data, state_of
from drivetrain.trainer.dry_run import Settings, fitting
from drivetrain.trainer.feeds import (
    batch_sizes,
    evaluation_feeds,
    may_change_data,
    starts_early,
    train_feed,
    with_accumulation,
)

if TYPE_CHECKING:
    from drivetrain.callbacks.checkpoint import CheckpointSaver


def check_task(task: object) -> TaskModule:
    """Return the task after a check of its type."""
    if isinstance(task, TaskModule):
        waiting: list[Any] = [task]
        while waiting:
            check_constructed(each := waiting.pop())
            waiting += (child for child in each._modules.values() if child is not None)
        check_task_names(task, HOOKS)
        return task
    if isinstance(task, type) and issubclass(task, TaskModule):
        raise ConfigError(f"the task is the class {task.__name__}; pass an instance: {task.__name__}(...)")
    if (theirs := foreign(task)) is not None:
        raise ConfigError(f"the task is {theirs}")
    raise ConfigError(
        f"the task is a {type(task).__name__}, not a TaskModule. Subclass drivetrain.TaskModule, or use"
        " drivetrain.Engine for a loop of your own over any nn.Module"
    )


_VERBS = {"validation": "validate"}
"""The Trainer's method of a stage, if its name differs."""

_LOGGED = 50
"""The steps between two log points by default."""


@contextmanager
def setting_up(settings: RunSettings, task: TaskModule, verb: str, **arguments: Any) -> Iterator[Engine]:
    """Run the block, the set-up of a run, with its engine, whose failure channel stays open for the run.

    An error is reported to the other ranks before this one leaves them.
    """
    engine = Engine(
        strategy=settings.strategy,
        precision=as_precision(settings.precision),
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        seed=settings.seed,
        compile=settings.compile,
        memory=settings.memory,
    )
    ranks = engine.ranks
    try:
        with ExitStack() as after_error:
            if ranks.size > 1:
                signs = partial(thread_location, threading.get_ident())
                status = Status(lambda: "in the set-up of the run", signs=signs)
                channel = FailureChannel(ranks.rank, ranks.size, status=status, order=ranks.order)
                engine.channel = after_error.enter_context(channel)
            check_same_call(same_on_all_ranks(settings), task, engine.strategy, verb, **arguments)
            yield engine
            after_error.pop_all()
    except BaseException:
        engine.teardown()
        raise


def planned_length(settings: RunSettings, feed: Feed, world_size: int) -> RunLength:
    """Return the length of a fit, as far as it is known."""
    max_epochs, calendar = settings.max_epochs, feed.calendar
    max_tokens = None if settings.max_tokens is None else token_count("max_tokens", settings.max_tokens)
    if {max_epochs, max_tokens, settings.max_steps, settings.max_time} == {None}:
        raise ConfigError("how long to train? Give the Trainer max_epochs, max_steps, max_tokens or max_time")
    known = [] if settings.max_steps is None else [settings.max_steps]
    epochs = end = None
    if max_epochs is not None:
        epochs = math.ceil(max_epochs)
        end = epochs, 0
        if calendar.length is not None:
            known.append(steps := calendar.step_of(Every(max_epochs, "epochs")))
            if steps < calendar.windows_before(epochs):
                last = calendar.after(steps)
                end = last.epoch, last.rounds
        elif max_epochs != epochs:
            raise ConfigError(
                f"max_epochs={max_epochs} needs training data of known length. Give whole epochs,"
                " or max_steps"
            )
    total = min(known) if known else None
    if max_tokens is not None:
        calendar.whole = calendar.resolved(Every(max_tokens, "tokens"))
    elif total:
        calendar.whole = Every(total)
    return RunLength(
        steps=total,
        epochs=epochs,
        steps_per_epoch=calendar.steps_per_epoch,
        max_steps=settings.max_steps,
        max_seconds=duration("max_time", settings.max_time),
        max_epochs=max_epochs,
        max_tokens=max_tokens,
        end=end,
        gradient_accumulation_steps=feed.accumulation,
        samples_per_step=feed.samples_per_step,
        world_size=world_size,
        min_steps=settings.min_steps or 0,
        calendar=calendar,
    )


def every(interval: Any) -> Every | None:
    """Return an interval that the Trainer has already parsed."""
    return None if interval is None else Every(interval)


def make_triggers(settings: RunSettings, calendar: Calendar, validates: bool) -> Triggers:
    """Return the triggers of logging and validation; "auto" logs every epoch that is known to be short."""
    validate_every, begins = every(settings.validate_every), every(settings.validate_from)
    validate = Trigger(validate_every, calendar, begins=begins)  # refuses what cannot be counted
    log_every, ends_epochs = settings.log_every, False
    if log_every == "auto":
        ends_epochs = calendar.length is None or calendar.windows_in(0) >= _LOGGED
        log_every = _LOGGED if ends_epochs else "1 epoch"
    log = Trigger(
        every(log_every), calendar, first_step=bool(settings.log_first_step), ends_epochs=ends_epochs
    )
    return Triggers(log, validate if validates else Trigger(None))


def checked_fit_data(settings: RunSettings, train_data: Any, validation_data: Any) -> tuple[Any, Any]:
    """Return the training and validation data of what `fit` was given, after a check of the settings."""
    train_data, validation_data = fit_data(train_data, validation_data)
    batch_sizes(settings, train_data)
    check_settings_used(
        train_data,
        validation_data,
        at_start(settings.batch_size),
        settings.num_workers,
        settings.evaluation_batch_size,
        settings.collate,
    )
    return train_data, validation_data


def build_fit(
    settings: Settings,
    task: Any,
    train_data: Any,
    validation_data: Any,
    resume: str | None,
    body: bool = False,
) -> tuple[Settings, Run, CheckpointSaver | None, Start]:
    """Build the run of a fit, and its saver unless checkpoints are off; `start_from` makes it ready to start.

    Args:
        body: Whether the user's code runs between steps.

    Returns:
        The settings with the task's callbacks, the run, the saver, and where the run begins.
    """
    began = fit_began()
    task = check_task(task)
    train_loaded(task)
    with setting_up(settings, task, "fit", resume=resume) as engine:
        # Now that the ranks are connected: a data object may ask for their number, or wait for one of them.
        engine.closing.enter_context(begun("fit", task, train_data, validation_data))
        settings = with_callbacks_of(task, settings)
        states = state_of(train_data)
        data = checked_fit_data(settings, train_data, validation_data)
        run, saver, start = _fit_run(settings, engine, task, data, states, resume, body)
    if run.is_main and run.run_dir is not None and (saver is not None or run.loggers):
        run.ledger.keep(run.run_dir, began)
    return settings, run, saver, start


def with_callbacks_of(task: TaskModule, settings: Settings) -> Settings:
    """Return the settings of a fit with the task's callbacks before the Trainer's, all checked together."""
    own = _own_callbacks(task, "train")
    if is_probe():  # those that change the task before its optimizers are built are a part of it
        own = [each for each in own if type(each).modify_task is not built_in.Callback.modify_task]
    if settings.dry_run is not None:
        own = fitting(own, settings)
    return dataclasses.replace(settings, callbacks=(*own, *settings.callbacks)) if own else settings


def _own_callbacks(task: TaskModule, stage: str) -> Sequence[Any]:
    given_by = f"{type(task).__name__}.configure_callbacks({stage!r})"
    return checked_callbacks(task.configure_callbacks(stage), given_by)


def _fit_run(
    settings: RunSettings,
    engine: Engine,
    task: TaskModule,
    data: tuple[Any, Any],
    states: list[DataObject],
    resume: str | None,
    body: bool,
) -> tuple[Run, CheckpointSaver | None, Start]:
    train_data, validation_data = data
    callbacks = settings.callbacks
    changes = body or may_change_data(callbacks)
    feed = train_feed(settings, engine, task, train_data, changes)
    settings = with_accumulation(settings, feed)
    length = planned_length(settings, feed, engine.strategy.world_size)
    engine.closing.enter_context(known_fit(task, length, engine.progress))
    declared = declared_by(task)
    by_loader = _by_loader(task, validation_data, declared)
    feeds = evaluation_feeds(
        settings, engine, task, validation_data, "validation", callbacks, changes, by_loader
    )
    check_data([feed, *(each for _, each in feeds)], engine.ranks)
    triggers = make_triggers(settings, length.calendar, validates=bool(feeds))
    size = settings.batch_size if settings.batch_size is not None else getattr(train_data, "batch_size", None)
    check_strategy_settings(settings, engine.strategy, size)
    if resume is None and not may_start_again() and starts_early(callbacks):
        feed.begin(until=length.epochs_until(engine.progress))  # which is at its beginning
    engine.closing.enter_context(modify_task(callbacks, task))
    frozen = frozen_parameters(settings, engine, task)
    train_metrics = _made_metrics(engine, declared) if settings.train_metrics else None
    engine.prepare_task(
        task,
        total_steps=length.steps,
        calendar=length.calendar,
        max_grad_norm=settings.max_grad_norm,
        max_grad_value=settings.max_grad_value,
        metrics=train_metrics,
        micro_batch=settings.micro_batch,
        show=bool(settings.progress_bar),
    )
    _preflight(engine, task, length)
    run_dir = engine.ranks.first(lambda: pick_run_dir(settings, task, engine.closing))
    saver, start = None, Start()
    if settings.checkpoint is not False or resume is not None:
        from drivetrain.trainer.checkpoints import open_checkpoints

        names = [name for name, _ in feeds]
        start, saver = open_checkpoints(settings, task, run_dir, names, resume, engine)
    run = Run(
        task,
        engine,
        stage="train",
        callbacks=with_defaults(settings, callbacks, saver, states),
        loggers=build_loggers(settings.loggers, run_dir) if engine.strategy.rank == 0 else (),
        run_dir=run_dir,
        length=length,
        triggers=triggers,
        train_feed=feed,
        evaluation_feeds=feeds,
        train_metrics=train_metrics,
        evaluation_metrics=_evaluation_metrics(engine, task, by_loader, declared) if feeds else None,
        on_save_error=settings.on_save_error,
        frozen=frozen,
    )
    _check_monitored_metrics(run)
    _connect(settings, run)
    return run, saver, start


def _preflight(engine: Engine, task: TaskModule, length: RunLength) -> None:
    """Check that the optimizers and their schedules fit the length of the fit."""
    check_same_optimizers(task, engine.updaters, length.steps, engine.ranks)
    schedules = [each.torch_schedule for each in engine.updaters.values() if each.torch_schedule is not None]
    for schedule in schedules:
        schedule.check_length(length.steps, length.epochs)
    for schedule in schedules if engine.strategy.rank == 0 else ():
        schedule.warn_if_never(length.steps, length.epochs)


def _connect(settings: RunSettings, run: Run) -> None:
    """Give the schedules, the policy on NaN and the engine what they need of the run."""
    engine = run.engine
    for updater in engine.updaters.values():
        updater.resolve_direction(run.names.direction)
        if run.is_main and updater.torch_schedule is not None:
            updater.torch_schedule.report()
    run.nonfinite.begin(settings.on_nonfinite)
    if run.hooks.on_micro_batch_end:

        def micro_batch_end(batch: Any, outputs: Any) -> None:
            with preserved(engine.device):  # the next micro-batch draws on from here
                run.call_about(batch, map_tensors(Tensor.detach, outputs), run.hooks.on_micro_batch_end)

        engine.watch_micro_batches(micro_batch_end)
    if run.hooks.on_before_optimizer_step:
        engine.before_optimizer_step = lambda: run.call(run.hooks.on_before_optimizer_step)


def _check_monitored_metrics(run: Run) -> None:
    """Check that the values that schedules depend on can come.

    In a probe none of them may come, and such schedules stand still.
    """
    if is_probe():
        for each in run.engine.updaters.values():
            if each.monitored_metric() is not None:
                each.torch_schedule = None
        return
    by_epoch = "One by epochs may follow training: TorchSchedule(..., every='1 epoch', metric='train/loss')"
    for name, unit in filter(None, (each.monitored_metric() for each in run.engine.updaters.values())):
        if unit == "validations":
            MonitoredMetric(name, "a schedule monitors", by_epoch, of_validations=True).begin(run)
        elif run.names.stage_of(name) is not None:
            MonitoredMetric(name, "a schedule monitors").begin(run)


def _made_metrics(engine: Engine, declared: Mapping[str, Any]) -> DeclaredMetrics | None:
    if declared:
        check_outputs(engine.strategy, "metrics()")
    return DeclaredMetrics(declared, engine.device, engine.data_ranks) if declared else None


def _by_loader(
    task: TaskModule, data: Any, declared: Mapping[str, Any] | None = None
) -> dict[str | None, Mapping[str, Any]]:
    """Return a task's metrics by the name of the evaluation data; by None, if they are the same for all.

    Args:
        declared: These, if they are known.
    """
    if takes_loader(task):
        loaders = data.data if isinstance(data, AlreadySplit) else data
        names = loaders if isinstance(loaders, Mapping) else (None,)
        return {name: declared_by(task, name) or {} for name in names}
    return {None: declared or declared_by(task) or {}}


def _evaluation_metrics(
    engine: Engine, task: TaskModule, loaders: Iterable[str | None], of_training: Mapping[str, Any]
) -> dict[str | None, DeclaredMetrics]:
    """Return the metrics of a fit's evaluations.

    A task that keeps its metrics returns those of training again: an evaluation in the middle of a log
    interval must not reset them.
    """
    found = {}
    for loader in loaders:
        metrics = declared_by(task, loader) or {}
        made = DeclaredMetrics(metrics, engine.device, engine.data_ranks)
        shared = any(each is of_training.get(name) for name, each in metrics.items())
        found[loader] = made.copies() if shared else made
    return found


@contextmanager
def modify_task(callbacks: Sequence[Any], task: TaskModule) -> Iterator[None]:
    """Run the block, a fit, inside `modify_task(task)` of the callbacks."""
    with ExitStack() as stack:
        for each in callbacks:
            stack.enter_context(each.modify_task(task))
        yield


def frozen_parameters(settings: RunSettings, engine: Engine, task: TaskModule) -> FrozenParameters | None:
    """Return the frozen parameters that the checkpoints leave out, or None; before they are sharded."""
    chosen = next((each.parameters for each in chosen_policies(settings.checkpoint)), None)
    names = None if chosen == "trainable" else info_of(task).left_out
    if settings.checkpoint is False:
        return None
    if chosen == "all" or (names is not None and not names):
        check_storable(task)
        return None
    check_left_out(task, names or ())
    return FrozenParameters(engine.ranks.first(lambda: fingerprints(task, names)))


def given_run_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a run directory."""
    given = Path(run_dir).absolute()
    taken = next((each for each in (given, *given.parents) if each.exists()), None)
    if taken is not None and not taken.is_dir():
        raise ConfigError(
            f"run_dir={str(run_dir)!r} cannot be made: {str(taken)!r} {odd_kind(taken) or 'is a file'}"
        )
    return given


def pick_run_dir(settings: RunSettings, task: TaskModule, closing: ExitStack) -> Path | None:
    """Return the run directory: the given one, or a new one if the run writes files.

    The path is absolute, because the task may change the working directory. At `closing`, a directory is
    removed that the fit has made and that is empty, as after a refusal.

    Raises:
        ConfigError: A file has its name. The error comes now, not hours later at the first save.
    """
    if settings.run_dir is not None:
        given = given_run_dir(settings.run_dir)
        closing.callback(_remove_empty, _missing(given))
        return given
    if not has_run_dir(settings):
        return None
    stem = f"{settings.run_name or type(task).__name__}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        path = Path("runs").absolute() / (f"{stem}-{number}" if number else stem)
        missing = _missing(path)
        try:
            path.mkdir(parents=True)
        except (FileExistsError, FileNotFoundError):  # another run has made it, or removed an empty "runs"
            continue
        closing.callback(_remove_empty, missing)
        return path
    raise ConfigError("no free name for a new run directory under 'runs'; give the Trainer a run_dir")


def _missing(path: Path) -> list[Path]:
    """Return a path and those of its parents that do not exist, the path first."""
    return [each for each in (path, *path.parents) if not each.exists()]


def _remove_empty(directories: Sequence[Path]) -> None:
    with suppress(OSError):  # one that holds files, and its parents, stay
        for each in directories:
            each.rmdir()


def with_defaults(
    settings: RunSettings, given: Sequence[Any], saver: CheckpointSaver | None, states: Sequence[Any] = ()
) -> list[Any]:
    """Return the callbacks in calling order: the task's and the user's, those that show values, other states,
    the saver.

    The saver saves the changes of all before it. Callbacks with `after_saver` follow it. An average comes
    first, so that all others are inside it: their evaluations see it, and it sees what their `on_step_end`
    has changed.
    """
    callbacks = list(given)
    if settings.progress_bar:
        if not any(isinstance(each, built_in.ModelSummary) for each in callbacks):
            callbacks.append(built_in.ModelSummary())
        if not any(isinstance(each, built_in.ProgressBar) for each in callbacks):
            style = settings.progress_bar if isinstance(settings.progress_bar, str) else "tqdm"
            callbacks.append(built_in.ProgressBar(style=style))
    if as_compile(settings.compile) and not any(isinstance(each, built_in.CompileTime) for each in callbacks):
        callbacks.append(built_in.CompileTime(show=bool(settings.progress_bar)))
    late = [each for each in callbacks if each.after_saver]
    first = [each for each in callbacks if not each.after_saver]
    first.sort(key=lambda each: not isinstance(each, built_in.WeightAverage))
    return [*first, *states, *([saver] if saver else []), *late]


def build_evaluation(
    settings: RunSettings, task: Any, data: Any, stage: str, checkpoint: str | None, metrics: bool = True
) -> Run:
    """Build the run of a validation, test or prediction outside a fit: no loggers, no files."""
    task = check_task(task)
    verb = _VERBS.get(stage, stage)
    with setting_up(settings, task, verb, checkpoint=checkpoint, metrics=metrics) as engine:
        return _evaluation_run(settings, engine, task, data, stage, checkpoint, metrics)


def _evaluation_run(
    settings: RunSettings,
    engine: Engine,
    task: TaskModule,
    data: Any,
    stage: str,
    checkpoint: str | None,
    metrics: bool,
) -> Run:
    engine.closing.enter_context(begun(_VERBS.get(stage, stage), task, data))
    callbacks: Sequence[Any] = (*_own_callbacks(task, stage), *settings.callbacks)
    if checkpoint is not None:
        from drivetrain.checkpoint.weights.load import load_weights
        from drivetrain.task.stored import read_extras, read_frozen
        from drivetrain.trainer.checkpoints import named_checkpoint

        path = engine.ranks.first(lambda: named_checkpoint(settings, checkpoint))
        tensors = load_weights(path)
        extras = read_extras(path, task, tensors)
        kept = read_frozen(path, task)
        load_module_state(task, tensors, extras, where=path, adopt_dtypes=True, kept=kept)
    data = pick_data(data, stage)
    if stage == "predict" and isinstance(data, Mapping):
        raise ConfigError("predict takes one loader, not a mapping; call it once for each")
    loaders = [*data.values()] if isinstance(data, Mapping) else [data]
    check_evaluation_size(loaders, stage, settings.evaluation_batch_size)
    engine.prepare_task(task, training=False)
    declared = _by_loader(task, data) if metrics else None
    feeds = evaluation_feeds(settings, engine, task, data, stage, callbacks, declared=declared)
    if not feeds:
        raise ConfigError(
            f"no data to {stage}: give a DataLoader, a Dataset, an iterable of batches or a mapping of named"
            " loaders"
        )
    check_data([each for _, each in feeds], engine.ranks)
    callbacks = with_defaults(settings, callbacks, None)
    return Run(
        task,
        engine,
        stage=stage,
        callbacks=[each for each in callbacks if not isinstance(each, built_in.ModelSummary)],
        run_dir=Path(settings.run_dir) if settings.run_dir is not None else None,
        evaluation_feeds=feeds,
        evaluation_metrics={
            loader: DeclaredMetrics(each, engine.device, engine.data_ranks)
            for loader, each in (declared or {}).items()
        },
    )
