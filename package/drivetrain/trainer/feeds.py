"""A run's data feeds, built from the Trainer's arguments and the user's data; workers end with the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.int_schedule import IntSchedule, at_start, most, number_or_schedule
from drivetrain.core.intervals import Every
from drivetrain.data import Feed, as_source, evaluation_sources, pin_memory_for
from drivetrain.data.known_tokens import tokens_per_batch
from drivetrain.data.reading import is_dataset
from drivetrain.data.sources import Source
from drivetrain.engine.engine import Engine
from drivetrain.engine.metrics.epoch_metric import EpochMetric
from drivetrain.run.hooks import HOOKS, is_used
from drivetrain.run.setting_checks import check_outputs
from drivetrain.run.settings import RunSettings, known_accumulation
from drivetrain.task.model_info import info_of
from drivetrain.task.task import TaskModule, measure_of

Settings = TypeVar("Settings", bound=RunSettings)


def train_feed(
    settings: RunSettings, engine: Engine, task: TaskModule, data: Any, changes: bool = False
) -> Feed:
    """Return the training data as windows of micro-batches.

    Args:
        changes: Whether the user's code may change it during the run.
    """
    sizes = settings.batch_size
    source = as_source(
        data,
        "training",
        settings.seed if settings.data_seed is None else settings.data_seed,
        batch_size=at_start(sizes),
        num_workers=settings.num_workers,
        shuffle=True,
        divides=True,
        pin_memory=pin_memory_for(engine.device),
        shard=engine.shard,
        ranks=engine.data_ranks,
        changes=changes,
        collate=settings.collate,
        task_collate=info_of(task).collate,
        group_by_length=settings.group_by_length,
        accumulation=most(known_accumulation(settings)),
    )
    if getattr(getattr(source.loader, "dataset", None), "is_endless", False) and not (
        settings.max_steps or settings.max_tokens or settings.max_time
    ):
        raise ConfigError(
            'the training data is a mixture until="forever", whose epoch has no end. Give the Trainer'
            " max_steps, max_tokens or max_time"
        )
    feed = Feed(
        source,
        engine.transfer,
        measure_of(task),
        accumulation(settings, source),
        settings.limit_train_batches,
        batch_sizes(settings, data),
        engine.progress,
    )
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


def accumulation(settings: RunSettings, source: Source) -> int | Mapping[Any, int]:
    """Return the micro-batches of a step on each process.

    Raises:
        ConfigError: The tokens of a micro-batch are unknown, or those of a step are no whole number of
            micro-batches.
    """
    steps = settings.gradient_accumulation_steps
    if not isinstance(steps, Every):
        return known_accumulation(settings)
    tokens, asked = int(steps.amount), f"gradient_accumulation_steps='{steps}'"
    loader, processes, sizes = source.loader, source.shard.size, settings.batch_size
    points = sizes if isinstance(sizes, Mapping) else {0: getattr(loader, "batch_size", None)}
    found = {}
    for point, size in points.items():
        each = tokens_per_batch(loader, size)
        if each is None:
            raise ConfigError(
                f"{asked} needs data whose micro-batches have equally many tokens. Give rows of"
                " drivetrain.data.packed, or data with an attribute tokens_per_sample, and a batch_size; or"
                " batches of drivetrain.data.by_tokens. Otherwise give a number of micro-batches"
            )
        found[point], rest = divmod(tokens, whole := each * processes)
        if rest:
            raise ConfigError(
                f"{asked} is no whole number of micro-batches: one of each process is {whole} tokens"
                f" ({each} x {processes}). Give '{max(round(tokens / whole), 1) * whole} tokens'"
            )
    return number_or_schedule(asked, found)


def with_accumulation(settings: Settings, feed: Feed) -> Settings:
    """Return the settings with the number of micro-batches of the training data."""
    if not isinstance(settings.gradient_accumulation_steps, Every):
        return settings
    return replace(settings, gradient_accumulation_steps=dict(feed.calendar.batches))


def evaluation_feeds(
    settings: RunSettings,
    engine: Engine,
    task: TaskModule,
    data: Any,
    stage: str,
    callbacks: Iterable[Any] = (),
    changes: bool = False,
    declared: Mapping[str | None, Mapping[str, Any]] | None = None,
) -> list[tuple[str | None, Feed]]:
    """Return evaluation or prediction data by loader name; an empty result for None.

    Args:
        changes: Whether the user's code may change it during the run.
        declared: The task's metrics by loader name; None for a prediction without them.
    """
    if data is None:
        return []
    in_order = stage == "predict" or reads_all(callbacks, declared)
    if in_order or any((declared or {}).values()):
        check_outputs(engine.strategy, "predict" if stage == "predict" else "metrics()")
    sources = evaluation_sources(
        data,
        stage,
        settings.seed,
        batch_size=evaluation_batch_size(settings),
        num_workers=settings.num_workers,
        collate=settings.collate,
        task_collate=info_of(task).collate,
        in_order=in_order,
        every_sample=True,
        pin_memory=pin_memory_for(engine.device),
        shard=engine.shard,
        ranks=engine.data_ranks,
        changes=changes,
    )
    limit = getattr(settings, f"limit_{stage}_batches")
    # `loss_weight` may count labels, which data to predict may lack.
    measure = None if stage == "predict" and declared is None else measure_of(task)
    feeds = [(name, Feed(source, engine.transfer, measure, 1, limit)) for name, source in sources]
    for _, feed in feeds:
        engine.closing.callback(feed.close)
    return feeds


def batch_sizes(settings: RunSettings, data: Any) -> IntSchedule | None:
    """Return the schedule of the training data's batch size; None if it does not change."""
    sizes = settings.batch_size
    if not isinstance(sizes, IntSchedule):
        return None
    if not is_dataset(data) or isinstance(data, IterableDataset):
        raise ConfigError(
            f"batch_size={sizes!r} changes during the run. The training data must then be a dataset"
            f" with a length, not a {type(data).__name__}. Pass the dataset itself, and its"
            " options to the Trainer (num_workers, collate); or change gradient_accumulation_steps"
        )
    own = getattr(data, "batch_size", None)
    if own is not None:
        raise ConfigError(
            f"batch_size={sizes!r} changes during the run, but the dataset ({type(data).__name__}) has an"
            f" attribute batch_size={own!r}, which would be used instead. Remove one of them"
        )
    if isinstance(settings.limit_train_batches, float):
        raise ConfigError(
            f"limit_train_batches={settings.limit_train_batches} is a fraction of an epoch's batches, whose"
            f" number changes with batch_size={sizes!r}. Give a number of batches"
        )
    return sizes


def evaluation_batch_size(settings: RunSettings) -> int | None:
    """Return the batch size of evaluation data: where that of training changes, the largest."""
    size = settings.evaluation_batch_size or settings.batch_size
    return None if size is None else most(size)


def reads_all(callbacks: Iterable[Any], declared: Mapping[str | None, Mapping[str, Any]] | None) -> bool:
    """Return whether something reads a whole evaluation, in sample order."""
    if any(isinstance(each, EpochMetric) for of in (declared or {}).values() for each in of.values()):
        return True
    readers = [reader for each in callbacks if (reader := each.evaluation_reader()) is not None]
    for reader in readers:
        reader.close()
    return bool(readers)


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


def _calls_user(callbacks: Iterable[Any], hooks: Sequence[str]) -> bool:
    for callback in callbacks:
        used = [hook for name in hooks if is_used(hook := getattr(callback, name))]
        changes = callback.changes_data
        if changes is None:  # an object of the user's, or of this package with a hook of the user's
            changes = any(not str(getattr(hook, "__module__", "")).startswith("drivetrain.") for hook in used)
        if used and changes:
            return True
    return False
