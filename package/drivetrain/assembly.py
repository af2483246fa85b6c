"""From a Trainer's arguments to the objects of a run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import later
from drivetrain.agreement import check_alike, check_optimizers_alike
from drivetrain.compiling import as_compile
from drivetrain.data import Feed
from drivetrain.data.alike import check_data
from drivetrain.data.reading import check_settings_used
from drivetrain.declared_metrics import DeclaredMetrics
from drivetrain.distributed.environment import may_start_again
from drivetrain.distributed.failure import FailureChannel
from drivetrain.engine import Engine
from drivetrain.errors import ConfigError, nearest
from drivetrain.feeds import evaluation_feeds, may_change_data, starts_early, train_feed
from drivetrain.hooks import HOOKS
from drivetrain.ledger import fit_began
from drivetrain.loggers.base import build_loggers
from drivetrain.loop import begin_reading
from drivetrain.micro_batch import split_batches
from drivetrain.module_state import has_extras, load_module_state
from drivetrain.options import duration
from drivetrain.precision import as_precision
from drivetrain.run import Run, Totals, Triggers
from drivetrain.strategies import Settings, Strategy
from drivetrain.synonyms import check_task_names, foreign
from drivetrain.task import TaskModule
from drivetrain.types import Every, Trigger

if TYPE_CHECKING:
    from drivetrain.callbacks.checkpoint import CheckpointSaver
    from drivetrain.trainer import Trainer


def check_task(task: object) -> TaskModule:
    """The task, if it is one.

    Raises:
        ConfigError: It is a class, or no TaskModule, or one written for another library.
    """
    if isinstance(task, TaskModule):
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


_LOADERS = {
    "training": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
"""What Lightning's data modules call a stage's data."""

_VERBS = {"validation": "validate"}
"""What the Trainer's method is called, where that is not the stage's name."""


def pick_data(data: Any, stage: str) -> Any:
    """A stage's data: what was given, or what an object with `train_data()`, `validation_data()` and so on
    gives.

    Raises:
        ConfigError: Such an object without the method that is needed.
    """
    method = f"{'train' if stage == 'training' else stage}_data"
    if _has(data, method):
        return getattr(data, method)()
    offered = [f"{s}_data" for s in ("train", "validation", "test", "predict") if _has(data, f"{s}_data")]
    if offered:
        raise ConfigError(f"{type(data).__name__} has no {method}(). {nearest(method, offered)}")
    if (theirs := foreign(data)) is not None:
        raise ConfigError(f"the {stage} data is {theirs}")
    given = _LOADERS[stage]
    if _has(data, given) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise ConfigError(f"{type(data).__name__} has {given}(), which is called {method}() here. Rename it")
    return data


def _has(data: Any, method: str) -> bool:
    # Properties are not asked: some data sets (torchvision's) have deprecated ones of these names, which
    # warn.
    return not isinstance(inspect.getattr_static(data, method, None), property) and callable(
        getattr(data, method, None)
    )


def fit_data(train_data: Any, validation_data: Any) -> tuple[Any, Any]:
    """Training and validation data; an object with `validation_data()` gives both unless one is passed by
    itself.
    """
    if validation_data is None and callable(getattr(train_data, "train_data", None)):
        make = getattr(train_data, "validation_data", None)
        validation_data = make() if callable(make) else None
    elif validation_data is not None:
        validation_data = pick_data(validation_data, "validation")
    picked = pick_data(train_data, "training")
    if isinstance(picked, Mapping):
        raise ConfigError(
            "training data cannot be a mapping of loaders; only evaluation takes named loaders. Pass one"
            " loader"
        )
    return picked, validation_data


def make_engine(trainer: Trainer) -> Engine:
    """The engine of a run."""
    return Engine(
        strategy=trainer.strategy,
        precision=as_precision(trainer.precision),
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        seed=trainer.seed,
        compile=trainer.compile,
        memory=trainer.memory,
    )


@contextmanager
def setting_up(
    trainer: Trainer, task: TaskModule, engine: Engine, verb: str, **arguments: Any
) -> Iterator[None]:
    """What is done before a run begins: the process group is left if it fails, and told of it.

    Args:
        trainer: The settings.
        task: The task.
        engine: The engine.
        verb: The Trainer's method that was called.
        **arguments: What else all ranks must have been given alike.
    """
    ranks = engine.ranks
    try:
        with FailureChannel(ranks.rank, ranks.size, describe=lambda: "in the set-up of the run"):
            check_alike(trainer, task, engine.strategy, verb, **arguments)
            yield
            ranks.all_gather(None)  # one that has left could not be told of what fails on another
    except BaseException:
        engine.teardown()
        raise


def planned_totals(trainer: Trainer, feed: Feed) -> Totals:
    """How long a fit will be, as far as it is known.

    Raises:
        ConfigError: No limit was given.
    """
    if trainer.max_epochs is None and trainer.max_steps is None and trainer.max_time is None:
        raise ConfigError("how long to train? Give the Trainer max_epochs, max_steps or max_time")
    per_epoch = feed.updates_per_epoch
    known = [] if trainer.max_steps is None else [trainer.max_steps]
    if trainer.max_epochs is not None and per_epoch is not None:
        known.append(trainer.max_epochs * per_epoch)
    seconds = duration("max_time", trainer.max_time)
    return Totals(min(known) if known else None, trainer.max_epochs, per_epoch, trainer.max_steps, seconds)


def every(interval: Any) -> Every | None:
    """An interval that the Trainer has already read."""
    return None if interval is None else Every(interval)


def build_fit(
    trainer: Trainer,
    task: Any,
    train_data: Any,
    validation_data: Any,
    resume: str | None,
    body: bool = False,
) -> tuple[Run, CheckpointSaver | None]:
    """The run of a fit, and its saver unless it saves nothing; `start_from` makes it ready to start.

    Args:
        trainer: The settings.
        task: The task.
        train_data: As it was given to `fit`.
        validation_data: Likewise.
        resume: Likewise.
        body: Whether the loop has a body of the user's.
    """
    began = fit_began()
    task = check_task(task)
    train_data, validation_data = fit_data(train_data, validation_data)
    check_settings_used(train_data, validation_data, trainer.batch_size, trainer.num_workers)
    engine = make_engine(trainer)
    with setting_up(trainer, task, engine, "fit", resume=resume):
        run, saver = _fit_run(trainer, engine, task, train_data, validation_data, resume, body)
    if run.is_main and run.run_dir is not None and (saver is not None or run.loggers):
        run.ledger.keep(run.run_dir, began)
    return run, saver


def _fit_run(
    trainer: Trainer,
    engine: Engine,
    task: TaskModule,
    train_data: Any,
    validation_data: Any,
    resume: str | None,
    body: bool,
) -> tuple[Run, CheckpointSaver | None]:
    changes = body or may_change_data(trainer.callbacks)
    feed = train_feed(trainer, engine, task, train_data, changes)
    totals = planned_totals(trainer, feed)
    declared = task.metrics()
    train_metrics = (
        DeclaredMetrics(declared, engine.device, engine.data_ranks)
        if declared and trainer.train_metrics
        else None
    )
    feeds = evaluation_feeds(trainer, engine, task, validation_data, "validation", changes)
    check_data([feed, *(each for _, each in feeds)], engine.ranks)
    validate_every = every(trainer.validate_every) if feeds else None
    triggers = Triggers(
        Trigger(every(trainer.log_every), totals.updates_per_epoch),
        Trigger(validate_every, totals.updates_per_epoch),
    )
    size = trainer.batch_size if trainer.batch_size is not None else getattr(train_data, "batch_size", None)
    check_settings(trainer, engine.strategy, size)
    if resume is None and not may_start_again() and starts_early(trainer.callbacks):
        begin_reading(feed, totals, engine.progress)
    engine.prepare_task(
        task, total_updates=totals.updates, max_grad_norm=trainer.max_grad_norm, metrics=train_metrics
    )
    split_batches(trainer.micro_batch, engine, trainer.progress_bar)
    check_optimizers_alike(task, engine.updaters, totals.updates, engine.ranks)
    run_dir = engine.ranks.first(lambda: pick_run_dir(trainer, task))
    saver = None
    if trainer.checkpoint is not False:  # and what writes checkpoints is loaded for those alone who want them
        names = [name for name, _ in feeds]
        saver = later.make_saver(trainer, run_dir, names, resume, engine.ranks, engine.closing)
    run = Run(
        task,
        engine,
        stage="train",
        callbacks=with_defaults(trainer, saver),
        loggers=build_loggers(trainer.loggers, run_dir) if engine.strategy.rank == 0 else (),
        run_dir=run_dir,
        totals=totals,
        triggers=triggers,
        train_feed=feed,
        evaluation_feeds=feeds,
        train_metrics=train_metrics,
        evaluation_metrics=DeclaredMetrics(task.metrics(), engine.device, engine.data_ranks)
        if feeds and declared
        else None,
        on_save_error=trainer.on_save_error,
    )
    run.nonfinite.begin(trainer.on_nonfinite)
    if run.hooks.on_before_optimizer_step:
        engine.before_optimizer_step = lambda: run.call(run.hooks.on_before_optimizer_step)
    return run, saver


def check_settings(trainer: Trainer, strategy: Strategy, batch_size: Any = None) -> None:
    """Tell a strategy what the Trainer asks for.

    Args:
        trainer: The Trainer.
        strategy: The run's.
        batch_size: Samples of a micro-batch, if that is said anywhere.

    Raises:
        ConfigError: The strategy's own configuration says otherwise.
    """
    asked = Settings(
        batch_size if isinstance(batch_size, int) else None,
        trainer.gradient_accumulation_steps,
        trainer.max_grad_norm,
        strategy.world_size,
    )
    strategy.check_settings(asked, as_precision(trainer.precision))


def pick_run_dir(trainer: Trainer, task: TaskModule) -> Path | None:
    """The run directory: the one that was given, or a new one if anything will be written.

    Absolute, as the task may change the working directory.

    Raises:
        ConfigError: Something else has its name; hours later, at the first save, would be too late to say so.
    """
    if trainer.run_dir is not None:
        given = Path(trainer.run_dir).absolute()
        taken = next((each for each in (given, *given.parents) if each.exists()), None)
        if taken is not None and not taken.is_dir():
            raise ConfigError(f"run_dir={str(trainer.run_dir)!r} cannot be made: {str(taken)!r} is a file")
        return given
    named = [trainer.loggers] if isinstance(trainer.loggers, str) else trainer.loggers
    writes = trainer.checkpoint or (
        isinstance(named, Sequence) and any(isinstance(each, str) for each in named)
    )
    if not writes:
        return None
    stem = f"{type(task).__name__}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        path = Path("runs").absolute() / (f"{stem}-{number}" if number else stem)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise ConfigError("no free name for a new run directory under 'runs'; give the Trainer a run_dir")


def with_defaults(trainer: Trainer, saver: CheckpointSaver | None) -> list[Any]:
    """The user's callbacks, then what shows their values, then the saver, which sees what all others did."""
    callbacks = list(trainer.callbacks)
    if trainer.progress_bar:
        for kind in (later.ModelSummary, later.ProgressBar):
            if not any(isinstance(each, kind) for each in callbacks):
                callbacks.append(kind())
    if as_compile(trainer.compile) and not any(isinstance(each, later.CompileTime) for each in callbacks):
        callbacks.append(later.CompileTime(show=trainer.progress_bar))
    return [*callbacks, *([saver] if saver else [])]


def start_from(trainer: Trainer, run: Run, saver: CheckpointSaver | None, resume: str | None) -> None:
    """Restore a checkpoint if one is asked for, then set rates and intervals to where the run stands."""
    with run.timed("restore"):
        asks = resume is not None or may_start_again()
        found = later.find_checkpoint(trainer, run, saver, resume) if asks else None
        if found is not None:
            run.restore(found[1], found[0])
        if asks:
            later.tell_start(trainer, run, resume)
    # What cannot be stored is found now, not at a save.
    run.nonfinite.note_weights(None if saver is None else later.snapshot_run(run))
    run.engine.set_rates()
    run.triggers.log.start(run.progress)
    run.triggers.validate.start(run.progress)
    for logger in run.loggers if run.is_main else ():
        with run.logging_to(logger, f"the configuration that {type(logger).__name__} writes at update"):
            logger.log_config({"trainer": trainer.to_json(), "task": describe_task(run.task)})


def describe_task(task: TaskModule) -> dict[str, Any]:
    """A task for a log: its class and constructor arguments."""
    plain = (bool, int, float, str, type(None))
    hparams = {
        name: value if isinstance(value, plain) else repr(value) for name, value in task.hparams.items()
    }
    return {"class": type(task).__name__, "hparams": hparams}


def build_evaluation(trainer: Trainer, task: Any, data: Any, stage: str, checkpoint: str | None) -> Run:
    """The run of a validation, test or prediction outside a fit: no loggers, no files."""
    task = check_task(task)
    engine = make_engine(trainer)
    with setting_up(trainer, task, engine, _VERBS.get(stage, stage), checkpoint=checkpoint):
        return _evaluation_run(trainer, engine, task, data, stage, checkpoint)


def _evaluation_run(
    trainer: Trainer, engine: Engine, task: TaskModule, data: Any, stage: str, checkpoint: str | None
) -> Run:
    if checkpoint is not None:
        path = engine.ranks.first(lambda: later.named_checkpoint(trainer, checkpoint))
        tensors = later.load_weights(path)
        extras = later.read_extras(path) if has_extras(task) else {}
        load_module_state(task, tensors, extras, where=path, adopt_dtypes=True)
    engine.prepare_task(task, training=False)
    split_batches(trainer.micro_batch, engine, trainer.progress_bar)
    feeds = evaluation_feeds(trainer, engine, task, pick_data(data, stage), stage)
    if not feeds:
        raise ConfigError(
            f"no data to {stage}: give a DataLoader, a Dataset, an iterable of batches or a mapping of named"
            " loaders"
        )
    check_data([each for _, each in feeds], engine.ranks)
    declared = task.metrics() if stage != "predict" else {}
    callbacks = with_defaults(trainer, None)
    return Run(
        task,
        engine,
        stage=stage,
        callbacks=[each for each in callbacks if not isinstance(each, later.ModelSummary)],
        run_dir=Path(trainer.run_dir) if trainer.run_dir is not None else None,
        evaluation_feeds=feeds,
        evaluation_metrics=DeclaredMetrics(declared, engine.device, engine.data_ranks) if declared else None,
    )


def build_prediction(trainer: Trainer, task: Any, data: Any, checkpoint: str | None) -> Run:
    """The run of a prediction.

    Raises:
        ConfigError: Named loaders; a prediction has one order.
    """
    data = pick_data(data, "predict")  # once: it may be costly to make
    if isinstance(data, Mapping):
        raise ConfigError("predict takes one loader, not a mapping; call it once for each")
    return build_evaluation(trainer, task, data, "predict", checkpoint)
