"""The feeds of a run, from a Trainer's arguments and the user's data; their workers end with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.data import Feed, as_source, evaluation_sources, pin_memory_for
from drivetrain.engine import Engine
from drivetrain.errors import StrategyError
from drivetrain.hooks import HOOKS
from drivetrain.task import TaskModule, measure_of

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def train_feed(trainer: Trainer, engine: Engine, task: TaskModule, data: Any, changes: bool = False) -> Feed:
    """The training data as windows of micro-batches.

    Args:
        trainer: The settings.
        engine: The engine.
        task: The task.
        data: What the user gave.
        changes: Whether code of the user's may change it meanwhile.
    """
    source = as_source(
        engine.strategy.prepare_data(data),
        "training",
        trainer.seed,
        batch_size=trainer.batch_size,
        num_workers=trainer.num_workers,
        shuffle=True,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
        changes=changes,
    )
    steps = trainer.gradient_accumulation_steps
    feed = Feed(source, engine.transfer, measure_of(task), steps, trainer.limit_train_batches)
    if trainer.on_bad_batch == "skip":
        if engine.data_ranks.copies > 1:
            raise StrategyError(
                f"on_bad_batch='skip' with strategy {engine.strategy.name!r}, of which"
                f" {engine.data_ranks.copies} processes work on the same batch: one that cannot read it would"
                " leave it out alone. Use on_bad_batch='raise'"
            )
        feed.leave_out_bad()
    engine.closing.callback(feed.close)
    return feed


def evaluation_feeds(
    trainer: Trainer, engine: Engine, task: TaskModule, data: Any, stage: str, changes: bool = False
) -> list[tuple[str | None, Feed]]:
    """Evaluation or prediction data by loader name; none for None."""
    if data is None:
        return []
    sources = evaluation_sources(
        engine.strategy.prepare_data(data),
        stage,
        trainer.seed,
        batch_size=trainer.batch_size,
        num_workers=trainer.num_workers,
        in_order=stage == "predict",
        every_sample=True,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
        changes=changes,
    )
    limit = getattr(trainer, f"limit_{stage}_batches")
    # What a loss is a mean over may be counted by labels, which data to predict need not have.
    measure = None if stage == "predict" else measure_of(task)
    feeds = [(name, Feed(source, engine.transfer, measure, 1, limit)) for name, source in sources]
    for _, feed in feeds:
        engine.closing.callback(feed.close)
    return feeds


def starts_early(callbacks: Iterable[Any]) -> bool:
    """Whether the training data's workers may be started, with a copy of the dataset each, during the set-up.

    Not where a callback of the user's is called before the first batch is read: it may change the dataset.
    """
    return not _calls_user(callbacks, ("on_fit_start", "on_epoch_start"))


def may_change_data(callbacks: Iterable[Any]) -> bool:
    """Whether a callback of the user's is called between two epochs or in one: it may change the dataset, in
    ways that cannot all be seen, of which a run without workers would see every one.
    """
    return _calls_user(callbacks, HOOKS)


def _calls_user(callbacks: Iterable[Any], hooks: Iterable[str]) -> bool:
    for callback in callbacks:
        for name in hooks:
            hook = getattr(callback, name, None)
            if hook is None or getattr(hook, "__unused_hook__", False):
                continue
            if not str(getattr(hook, "__module__", "")).startswith("drivetrain."):
                return True
    return False
