"""The feeds of a run, from a Trainer's arguments and the user's data; their workers end with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from drivetrain.data import Feed, as_source, evaluation_sources, pin_memory_for
from drivetrain.engine import Engine
from drivetrain.task import TaskModule, measure_of

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer


def train_feed(trainer: Trainer, engine: Engine, task: TaskModule, data: Any) -> Feed:
    """The training data as windows of micro-batches."""
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
    )
    steps = trainer.gradient_accumulation_steps
    feed = Feed(source, engine.transfer, measure_of(task), steps, trainer.limit_train_batches)
    engine.closing.callback(feed.close)
    return feed


def evaluation_feeds(
    trainer: Trainer, engine: Engine, task: TaskModule, data: Any, stage: str
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
    )
    limit = getattr(trainer, f"limit_{stage}_batches")
    feeds = [(name, Feed(source, engine.transfer, measure_of(task), 1, limit)) for name, source in sources]
    for _, feed in feeds:
        engine.closing.callback(feed.close)
    return feeds


def starts_early(callbacks: Iterable[Any]) -> bool:
    """Whether the training data's workers may be started, with a copy of the dataset each, during the set-up.

    Not where a callback of the user's is called before the first batch is read: it may change the dataset.
    """
    for callback in callbacks:
        for name in ("on_fit_start", "on_epoch_start"):
            hook = getattr(callback, name, None)
            if hook is None or getattr(hook, "__unused_hook__", False):
                continue
            if not str(getattr(hook, "__module__", "")).startswith("drivetrain."):
                return False
    return True
