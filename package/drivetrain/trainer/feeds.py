"""A run's data feeds, built from the Trainer's arguments and the user's data; workers end with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drivetrain.core.errors import StrategyError
from drivetrain.data import Feed, Transfer, as_source, evaluation_sources, pin_memory_for
from drivetrain.engine.engine import Engine
from drivetrain.run.hooks import HOOKS, is_used
from drivetrain.run.settings import RunSettings
from drivetrain.task.task import TaskModule, measure_of


def train_feed(
    settings: RunSettings, engine: Engine, task: TaskModule, data: Any, changes: bool = False
) -> Feed:
    """Return the training data as windows of micro-batches.

    Args:
        settings: The settings.
        engine: The engine.
        task: The task.
        data: The user's data.
        changes: Whether the user's code may change it during the run.
    """
    source = as_source(
        engine.strategy.prepare_data(data),
        "training",
        settings.seed if settings.data_seed is None else settings.data_seed,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        shuffle=True,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
        changes=changes,
        collate=settings.collate or task.collate_function(),
        group_by_length=settings.group_by_length,
        accumulation=settings.gradient_accumulation_steps,
    )
    steps = settings.gradient_accumulation_steps
    feed = Feed(source, engine.transfer, measure_of(task), steps, settings.limit_train_batches)
    if settings.on_bad_batch == "skip":
        if engine.data_ranks.copies > 1:
            raise StrategyError(
                f"on_bad_batch='skip' with strategy {engine.strategy.name!r}:"
                f" {engine.data_ranks.copies} processes work on the same batch. If only one cannot read it,"
                " the others would not skip it. Use on_bad_batch='raise'"
            )
        feed.skip_bad_batches()
    engine.closing.callback(feed.close)
    return feed


def evaluation_feeds(
    settings: RunSettings, engine: Engine, task: TaskModule, data: Any, stage: str, changes: bool = False
) -> list[tuple[str | None, Feed]]:
    """Return evaluation or prediction data by loader name; an empty result for None."""
    if data is None:
        return []
    sources = evaluation_sources(
        engine.strategy.prepare_data(data),
        stage,
        settings.seed,
        batch_size=settings.evaluation_batch_size or settings.batch_size,
        num_workers=settings.num_workers,
        collate=settings.collate or task.collate_function(),
        in_order=stage == "predict" or reads_all(task),
        every_sample=True,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
        changes=changes,
    )
    limit = getattr(settings, f"limit_{stage}_batches")
    # `loss_weight` may count labels, which data to predict may lack.
    measure = None if stage == "predict" else measure_of(task)
    precision, transfer = engine.evaluation_precision, engine.transfer
    if precision is not None:
        transfer = Transfer(engine.device, precision.input_dtype, engine.strategy.place)
    feeds = [(name, Feed(source, transfer, measure, 1, limit)) for name, source in sources]
    for _, feed in feeds:
        engine.closing.callback(feed.close)
    return feeds


def reads_all(task: TaskModule) -> bool:
    """Return whether something reads a whole evaluation, in sample order."""
    reader = task.evaluation_reader()
    if reader is None:
        return False
    reader.close()
    return True


def starts_early(callbacks: Iterable[Any]) -> bool:
    """Return whether the workers of the training data may start during the set-up, each with a copy of the
    dataset.

    Not if a user's callback runs before the first batch is read: it may change the dataset.
    """
    return not _calls_user(callbacks, ("on_fit_start", "on_epoch_start"))


def may_change_data(callbacks: Iterable[Any]) -> bool:
    """Return whether a user's callback runs during or between epochs.

    It may change the dataset in undetectable ways, and a run without workers would see every change.
    """
    return _calls_user(callbacks, HOOKS)


def _calls_user(callbacks: Iterable[Any], hooks: Iterable[str]) -> bool:
    for callback in callbacks:
        for name in hooks:
            hook = getattr(callback, name, None)
            if not is_used(hook):
                continue
            of_user = not str(getattr(hook, "__module__", "")).startswith("drivetrain.")
            if of_user or getattr(callback, "calls_user", False):
                return True
    return False
