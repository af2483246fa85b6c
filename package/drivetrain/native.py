"""A loop of your own: any module prepared for it, and its data on the device, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from drivetrain.agreement import check_module_alike, check_optimizer_alike
from drivetrain.data import Feed, as_source, pin_memory_for
from drivetrain.data.alike import check_data
from drivetrain.precision import Precision
from drivetrain.progress import Progress
from drivetrain.strategies import Prepared, Strategy
from drivetrain.streams import Streams
from drivetrain.task import StepModule
from drivetrain.types import Batch
from drivetrain.updates import DEFAULT, made_by
from drivetrain.weight_updates import WeightUpdates
from drivetrain.window import OpenWindow

if TYPE_CHECKING:
    from drivetrain.engine import Engine

_STRIDE = 15_485_863
"""Between the streams of a window's micro-batches, which are numbered like those of far later updates."""


def prepare_module(
    strategy: Strategy,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    precision: Precision,
    weight_updates: WeightUpdates,
) -> Prepared:
    """A module placed and wrapped by a strategy, and its optimizer if one is wanted; see `Engine.prepare`.

    Raises:
        ConfigError: The processes have different strategies or optimizers.
        StrategyError: They have different modules.
    """
    check_module_alike(strategy, model)

    def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
        assert make_optimizer is not None
        return {DEFAULT: made_by(make_optimizer, model, weight_updates)[0]}

    making = make_optimizers if make_optimizer else None
    prepared = strategy.prepare(StepModule(model), making, precision)
    if make_optimizer:
        check_optimizer_alike(model, prepared.optimizer, strategy.ranks)
    if strategy.sharded and strategy.world_size > 1 and any(True for _ in model.buffers()):
        prepared.model.register_forward_pre_hook(_SharedBuffers(strategy))
    for name in ("state_dict", "load_state_dict"):  # by the names that the module itself has
        object.__setattr__(prepared.model, name, getattr(model, name))
    return prepared


class _SharedBuffers:
    """Tells a sharded strategy of each forward, before which it gives all processes rank 0's buffers.

    Of an evaluation, in which no buffer changes, before the first alone. All processes run every forward.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._changed = True

    def __call__(self, model: nn.Module, _: object) -> None:
        if model.training or self._changed:
            self._strategy.microbatch(model, True)
        self._changed = model.training


class EngineData:
    """Batches on the device, once through per iteration.

    Training data counts into the engine's progress: each iteration is the next epoch, and the first one after
    `Engine.load` goes on where the checkpoint stood, without fetching what was already used.

    Args:
        progress: The engine's.
        feed: The data.
        training: Whether it counts.
        streams: The engine's; each training batch is handed out under a random stream of its own, so that
            what is drawn between two batches, by an evaluation for example, moves nothing.
        window: The engine's; is told which batch was handed out.
    """

    def __init__(
        self, progress: Progress, feed: Feed, training: bool, streams: Streams, window: OpenWindow
    ) -> None:
        self._window = window
        self._progress = progress
        self._feed = feed
        self._training = training
        self._streams = streams

    def __len__(self) -> int:
        """The batches in an epoch.

        Raises:
            TypeError: The data does not know.
        """
        count = self._feed.batches_per_epoch
        if count is None:
            raise TypeError("this data has no known length")
        return count

    def __iter__(self) -> Iterator[Batch]:
        progress = self._progress
        if not self._training:
            # Of data that is only looked at, each sample once, on one of the processes.
            yield from (each.batch for each in self._feed.micro_batches() if not each.stand_in)
            return
        update, number = -1, 0
        for micro_batch in self._feed.micro_batches(progress.epoch, progress.position):
            update, number = progress.updates, number + 1 if progress.updates == update else 0
            # An update's first micro-batch draws what it draws under a Trainer.
            self._streams.seed_update(update + number * _STRIDE)
            progress.position += micro_batch.advance
            progress.micro_batches += 1
            everywhere = micro_batch.everywhere
            progress.samples += micro_batch.samples if everywhere is None else everywhere.samples
            self._window.handed = micro_batch
            yield micro_batch.batch
        self._window.handed = None
        progress.epoch += 1
        progress.position = 0


def engine_data(engine: Engine, data: Any, training: bool, window: OpenWindow) -> EngineData:
    """A user's data for an engine's loop; training data is seen to be the same on all ranks."""
    source = as_source(
        engine.strategy.prepare_data(data),
        "training" if training else "evaluation",
        engine.seed,
        pin_memory=pin_memory_for(engine.device),
        share=engine.share,
        ranks=engine.data_ranks,
    )
    feed = Feed(source, engine.transfer)
    if training:  # what is only looked at may be looked at by one rank alone
        check_data([feed], engine.ranks)
    return EngineData(engine.progress, feed, training, engine.streams, window)
