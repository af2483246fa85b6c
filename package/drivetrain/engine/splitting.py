"""Micro-batches that fit into memory: batches are split by samples, and into more parts after an
out-of-memory error.

The effective batch stays the same: the parts of a micro-batch share its weight, so that their gradients add
up to the gradient of the whole. Composer's automatic micro-batching does the same.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import clear_frames, free_caches, is_out_of_memory
from drivetrain.core.random_streams import HostDraws, generator_state, load_generator_state, shielded
from drivetrain.core.types import Batch
from drivetrain.core.validation import count
from drivetrain.data import GlobalCounts, MicroBatch, batch_size
from drivetrain.data.counting import Count
from drivetrain.engine.buffers import KeptBuffers
from drivetrain.engine.context import StepContext
from drivetrain.engine.metrics.means import Row
from drivetrain.engine.placeholder import has_zero_weight
from drivetrain.engine.split_batch import split_batch
from drivetrain.engine.weighting import StepResult, Weighted, weigh
from drivetrain.task.attributes import generators_of
from drivetrain.task.output import read_output
from drivetrain.task.task import measure_of

_LOG = logger(__name__)

AUTO = "auto"

_WEIGHT_TOLERANCE = 0.01
"""The relative difference allowed between the parts' weights and the whole's: 16-bit sums are that coarse."""

_NOT_EVEN_ONE = "drivetrain: not even a micro-batch of one sample fits"


class _RepeatStep(Exception):  # noqa: N818 - no error: another process ran out of memory
    """Ends an attempt on a process that had enough memory."""


class MicroBatches:
    """The splitting of training batches in one run.

    Args:
        spec: The largest number of samples of a part, or "auto" to find it by running out of memory.

    Attributes:
        searches: Whether the spec is "auto".
        size: The largest number of samples of a training part; None before the first out-of-memory error.
        begun_again: Functions to call each time a step is repeated.
    """

    def __init__(self, spec: int | str, engine: StepContext, show: bool = False) -> None:
        self.spec = spec
        self.searches = spec == AUTO
        self.size: int | None = None if isinstance(spec, str) else int(spec)
        self.begun_again: list[Callable[[], object]] = []
        self._engine = engine
        self._weigh = measure_of(engine.task).weight
        self._ranks = engine.ranks
        self._show = show and engine.ranks.rank == 0
        self._logged_size: int | None = None
        self._unlearned: list[MicroBatch] = []
        self._attempted: list[Any] = []
        self._largest = 0
        self._whole = 0
        self._buffers = KeptBuffers()
        self._generators = [*generators_of(engine.task).values()] if self.searches else []
        engine.transfer.keeps_host, engine.transfer.in_parts = self._weigh is not None, True
        engine.begins_again = self.searches
        self._shares_buffers = self._ranks.size > 1 and any(True for _ in engine.task.buffers())
        if engine.interleaved:
            raise ConfigError(
                f"micro_batch={spec!r}: {type(engine.task).__name__}.training_step is a generator. One of its"
                " optimizers may have stepped before memory runs out, so the step cannot be repeated. Use a"
                " smaller batch with gradient_accumulation_steps"
            )

    def __str__(self) -> str:
        if self.searches:
            return "auto" if self.size is None else f"auto ({self.size} samples)"
        return f"{self.size} samples"

    # Training.

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Run `Engine.train_step` in parts, and repeat it with smaller ones as long as memory runs out.

        Gradients are exchanged once, after all parts, so that ranks may have different numbers of parts.
        """
        engine = self._engine
        if self._shares_buffers:  # as a wrapper does before its forward, which is not called here
            engine.synchronize_buffers()
        draws, states = HostDraws(), [generator_state(each) for each in self._generators]
        if self.searches:
            self._buffers.keep(engine.task)
        step_values, metric_inputs, total, learns = self._until_it_fits(micro_batches, draws, states)
        self._attempted = []
        applied, norm = False, None
        if learns:
            if engine.strategy.world_size > 1:
                engine.strategy.synchronize(engine.parameters)
            applied, norm = engine.update(engine.optimizer, step_values, engine.parameters)
        self._log_size()
        return engine.finish(micro_batches, step_values, applied, norm, metric_inputs, total)

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch]
    ) -> tuple[list[Row], list[Any], GlobalCounts | None, bool]:
        """Run forward and backward of all parts; also return whether any rank had something to learn from."""
        engine = self._engine
        engine.streams.seed_step(engine.progress.steps)
        if engine.gate is not None:
            engine.gate.begin()
        weighted_batches, total = weigh(micro_batches, engine.sharing, engine.placeholders, engine.sums)
        self._whole = max(self._whole, *(each.samples for each in micro_batches))
        self._unlearned = []
        parts: Weighted = []
        for micro_batch, factor in weighted_batches:
            parts += self._shared_parts(micro_batch, factor)
        if weighted_batches and not parts:  # this rank has nothing to learn from
            parts = [(self._placeholder(weighted_batches[0][0]), 0.0)]
        self._attempted = [each.batch for each, _ in parts] + [each.batch for each in self._unlearned]
        self._largest = max((batch_size(each) or 1 for each in self._attempted), default=0)
        step_values, metric_inputs = engine.accumulate(parts, self._empty(micro_batches))
        # After all others, so that training does not depend on whether metrics are declared.
        for part in self._unlearned:
            with torch.no_grad(), shielded():
                part = engine.transfer.moved(part)
                outputs = read_output(engine.run_step(part.batch))[3]
            if outputs is not None:
                engine.show_metrics(outputs, part.batch, metric_inputs)
        if self.searches and self._ranks.size > 1 and self._ranks.total([0.0])[0]:
            raise _RepeatStep
        return step_values, metric_inputs, total, bool(weighted_batches)

    def _until_it_fits(
        self, micro_batches: Sequence[MicroBatch], draws: HostDraws, states: Sequence[Any]
    ) -> tuple[list[Row], list[Any], GlobalCounts | None, bool]:
        """Return the result of `_accumulate`, repeated with smaller parts as long as memory runs out."""
        while True:
            try:
                return self._accumulate(micro_batches)
            except Exception as error:
                lacks = isinstance(error, _RepeatStep) or is_out_of_memory(error)
                if not (self.searches and lacks):
                    raise
                self._shrink(error)
                clear_frames(error)
            self._undo(draws, states)  # now that the memory of the attempt is free
            free_caches()

    def _parts(self, micro_batch: MicroBatch, size: int | None, weigh: Count | None) -> list[MicroBatch]:
        if size is None:
            return [micro_batch]
        batch, host = micro_batch.batch, micro_batch.host
        try:
            batches = split_batch(batch, size)
            hosts = [None] * len(batches) if host is None else split_batch(host, size)
        except DataError as error:
            if self.searches:  # it may fit: another process, or a larger batch, has run out of memory
                return [micro_batch]
            error.add_note(f"drivetrain: asked for by micro_batch={size}; without it batches are run whole")
            raise
        if len(batches) == 1:
            return [micro_batch]
        return _weighted_parts(micro_batch, batches, hosts, weigh)

    def _shared_parts(self, micro_batch: MicroBatch, factor: float | Tensor | None) -> Weighted:
        if micro_batch.is_placeholder or has_zero_weight(micro_batch):
            return []
        parts = self._parts(micro_batch, self.size, self._weigh)
        if len(parts) == 1:
            return [(micro_batch, factor)]
        kept = [each for each in parts if each.weight]
        if self._engine.train_metrics is not None:
            self._unlearned += [each for each in parts if not each.weight]
        weight = sum(each.weight for each in kept)
        whole = 1.0 if factor is None else factor
        return [(each, whole * (each.weight / weight)) for each in kept]

    def _empty(self, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the parts whose loss has weight zero."""
        for each in micro_batches:
            if not (each.bad or isinstance(each.weight, Tensor)):
                yield from filter(has_zero_weight, self._parts(each, self.size, self._weigh))

    def _placeholder(self, micro_batch: MicroBatch) -> MicroBatch:
        """A part of a placeholder, for a rank that has nothing to learn from; see `Placeholders`."""
        part = self._parts(micro_batch, self.size, self._weigh)[0]
        return part._replace(weight=0.0, is_placeholder=True, bad=True)

    def _shrink(self, error: Exception) -> None:
        """Lower the size on all ranks after an error, or raise it."""
        failed = not isinstance(error, _RepeatStep)
        if failed:
            if self._largest <= 1:
                error.add_note(_NOT_EVEN_ONE)
                raise error
            for batch in self._attempted:
                _refuse_whole(batch, self._largest // 2, error)
            if self._ranks.size > 1:
                self._ranks.total([1.0])
        # The smallest size that failed: the other ranks had enough memory for theirs.
        sizes = self._ranks.all_gather(self._largest if failed else None)
        self.size = max(1, min(each for each in sizes if each is not None) // 2)

    def _undo(self, draws: HostDraws, states: Sequence[Any]) -> None:
        for parameter in self._engine.parameters:
            parameter.grad = None
        self._buffers.put_back()
        self._engine.transfer.forget()
        self._attempted = []
        draws.restore()
        for generator, state in zip(self._generators, states, strict=True):
            load_generator_state(generator, state)
        for call in self.begun_again:
            call()

    def _log_size(self) -> None:
        if self.size is None or self.size == self._logged_size:
            return
        self._logged_size = self.size
        weighed = "number of samples" if self._weigh is None else "loss_weight"
        words = f"micro-batch {self.size}: batches of {self._whole} run in parts, weighted by their {weighed}"
        _LOG.log(logging.INFO if self._show else logging.DEBUG, words)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore what `state_dict` returned, or None; a size that the Trainer was given takes precedence."""
        if state is not None and self.searches:
            self.size = None if state["size"] is None else count("its size", state["size"], at_least=1)


def _refuse_whole(batch: Any, size: int, error: Exception) -> None:
    """Check that a batch that ran out of memory can be split."""
    smaller = "use smaller batches with more gradient_accumulation_steps"
    if batch_size(batch) is None:
        raise DataError(f"a {type(batch).__name__} cannot be split by samples; {smaller}") from error
    try:
        split_batch(batch, size)
    except DataError as reason:
        raise DataError(f"out of memory, and {reason}; {smaller}") from error


def _weighted_parts(
    micro_batch: MicroBatch, batches: Sequence[Batch], hosts: Sequence[Batch], weigh: Count | None
) -> list[MicroBatch]:
    """Return the parts of a micro-batch with their weights.

    Args:
        hosts: The parts as the data gave them, or None for each. They are weighed like the whole; in a 16-bit
            copy a sum of weights may be rounded, or infinite.
        weigh: Returns a part's loss weight; None uses its number of samples.
    """
    samples = [batch_size(each) or 0 for each in batches]
    weights: Sequence[float] = samples
    if weigh is not None:
        given = [weigh(part if host is None else host) for part, host in zip(batches, hosts, strict=True)]
        weights = _checked(_numbers(given), samples, micro_batch)
    return [
        micro_batch._replace(batch=batch, weight=weight, samples=number, tokens=0, host=kept)
        for batch, weight, number, kept in zip(batches, weights, samples, hosts, strict=True)
    ]


def _numbers(weights: Sequence[Any]) -> list[float]:
    """Return the weights on the host; waits for them, because parts of weight zero are left out."""
    if any(isinstance(each, Tensor) for each in weights):
        numbers: list[float] = torch.stack([torch.as_tensor(each).reshape(()) for each in weights]).tolist()
        return numbers
    return [float(each) for each in weights]


def _checked(weights: Sequence[float], samples: Sequence[int], micro_batch: MicroBatch) -> Sequence[float]:
    for weight, number in zip(weights, samples, strict=True):
        if not 0 <= weight < math.inf:
            raise DataError(
                f"loss_weight gave {weight} for a part of {number} of a batch's {sum(samples)} samples; a"
                " weight is a number of samples or tokens, 0 or more"
            )
    whole, parts = micro_batch.weight, sum(weights)
    if isinstance(whole, Tensor) or micro_batch.is_placeholder:  # on an accelerator, or of another batch
        return weights
    if abs(parts - whole) > _WEIGHT_TOLERANCE * max(parts, whole):
        raise DataError(
            f"loss_weight gave {whole:g} for a batch of {sum(samples)} samples and {parts:g} for its"
            f" {len(weights)} parts together. Where batches are run in parts it must be a sum over samples,"
            " such as their number of tokens"
        )
    return weights
