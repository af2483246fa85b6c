"""Your own loop: any module prepared for it, and its data on the device, resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import Streams
from drivetrain.core.types import Batch
from drivetrain.data import Feed, MicroBatch
from drivetrain.engine.rank_consistency import check_same_module, check_same_optimizer
from drivetrain.engine.updater import DEFAULT, made_by
from drivetrain.engine.weighting import OpenWindow
from drivetrain.strategies import Prepared, Strategy
from drivetrain.strategies.precision.base import Precision
from drivetrain.task.optim.low_precision import WeightUpdates
from drivetrain.task.task import StepModule

_STRIDE = 15_485_863
"""The distance between the streams of a window's micro-batches, numbered like those of far later steps."""


def prepare_module(
    strategy: Strategy,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer] | None,
    precision: Precision,
    weight_updates: WeightUpdates,
) -> Prepared:
    """Return a module placed and wrapped by a strategy, and its optimizer if any; see `Engine.prepare`."""
    check_same_module(strategy, model)

    def make_optimizers(_: nn.Module) -> dict[str, Optimizer]:
        assert make_optimizer is not None
        optimizer, schedule = made_by(make_optimizer, model, weight_updates)
        if schedule is not None:
            raise ConfigError(
                "Engine.prepare was given a function that returns (optimizer, schedule), and in a loop of"
                " your own you step the schedule. Let it return the optimizer, make the schedule of the"
                " optimizer that prepare returns, and call schedule.step() after engine.step(optimizer)"
            )
        return {DEFAULT: optimizer}

    making = make_optimizers if make_optimizer else None
    prepared = strategy.prepare(StepModule(model), making, precision)
    if make_optimizer:
        check_same_optimizer(model, prepared.optimizer, strategy.ranks)
    if strategy.sharded and strategy.world_size > 1 and any(True for _ in model.buffers()):
        prepared.model.register_forward_pre_hook(_SharedBuffers(strategy))
    for name in ("state_dict", "load_state_dict"):  # with the module's own parameter names
        object.__setattr__(prepared.model, name, getattr(model, name))
    return prepared


class _SharedBuffers:
    """Announces each forward to a sharded strategy, which then gives all ranks the buffers of rank 0.

    In an evaluation no buffer changes, so only the first forward is announced. All ranks run every forward.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._changed = True

    def __call__(self, model: nn.Module, _: object) -> None:
        if model.training or self._changed:
            self._strategy.microbatch(model, True)
        self._changed = model.training


class EngineData:
    """Batches on the device, one pass per iteration.

    Training data counts in the engine's progress: each `for` is the next epoch, even after a `break`. The
    first `for` after `Engine.load` continues from the checkpoint's position, without fetching used batches
    again.

    Args:
        progress: The engine's progress.
        feed: The data.
        training: Whether it counts.
        streams: The engine's random streams. Each training batch gets a stream of its own, so that draws
            between two batches, by an evaluation for example, change nothing.
        window: The engine's window; records the current batch.
    """

    def __init__(
        self, progress: Progress, feed: Feed, training: bool, streams: Streams, window: OpenWindow
    ) -> None:
        self._window = window
        self._last: MicroBatch | None = None  # handed out in a pass that has not ended
        self._progress = progress
        self._feed = feed
        self._training = training
        self._streams = streams

    def __len__(self) -> int:
        count = self._feed.batches_per_epoch
        if count is None:
            raise TypeError("this data has no known length")
        return count

    def __iter__(self) -> Iterator[Batch]:
        progress = self._progress
        if not self._training:
            # Evaluation data: each sample once, on one of the ranks.
            yield from (each.batch for each in self._feed.micro_batches() if not each.is_placeholder)
            return
        if self._last is not None and self._window.handed is self._last:  # no checkpoint was loaded meanwhile
            self._end(progress)
        step, number = -1, 0
        for micro_batch in self._feed.micro_batches(progress.epoch, progress.position):
            step, number = progress.steps, number + 1 if progress.steps == step else 0
            # A step's first micro-batch has the same random stream as under a Trainer.
            self._streams.seed_step(step + number * _STRIDE)
            progress.position += micro_batch.advance
            progress.micro_batches += 1
            global_counts = micro_batch.global_counts
            progress.samples += micro_batch.samples if global_counts is None else global_counts.samples
            self._window.handed = self._last = micro_batch
            yield micro_batch.batch
        self._end(progress)

    def _end(self, progress: Progress) -> None:
        """End a pass: the next one is another epoch."""
        self._window.handed = self._last = None
        progress.epoch += 1
        progress.position = 0
