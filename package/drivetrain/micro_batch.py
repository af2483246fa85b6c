"""Micro-batches that fit into memory: batches are split by samples, and by more after running out of it.

The effective batch stays what the data and the accumulation make it: the parts of a micro-batch share its
weight, so that their gradients sum up to its own. Composer's automatic micro-batching does the same.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.data import Everywhere, MicroBatch, batch_size, to_host
from drivetrain.data.parts import join_outputs, split_batch
from drivetrain.errors import CheckpointError, ConfigError, DataError, StrategyError
from drivetrain.options import count
from drivetrain.out_of_memory import advice, free_caches, is_out_of_memory, let_go
from drivetrain.step_output import StepValues
from drivetrain.strategies import Strategy
from drivetrain.task import measure_of
from drivetrain.window import StepResult, Weighted, shared, weighted

if TYPE_CHECKING:
    from drivetrain.engine import Engine

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

AUTO = "auto"


def check_micro_batch(spec: int | str | None, strategy: Strategy) -> None:
    """See that batches can be split as asked.

    Raises:
        ConfigError: It is no number of samples, "auto" or None.
        StrategyError: The strategy's steps cannot be run in parts, or not be begun again; says why.
    """
    if spec is None:
        return
    if isinstance(spec, str) and spec != AUTO:
        raise ConfigError(f"micro_batch must be 'auto', a number of samples, or None, not {spec!r}")
    if not isinstance(spec, str):
        count("micro_batch", spec, at_least=1)
    if strategy.no_micro_batch:
        raise StrategyError(
            f"micro_batch={spec!r} with strategy {strategy.name!r}: {strategy.no_micro_batch}. Use a smaller"
            " batch with gradient_accumulation_steps"
        )


class _BeginAgain(Exception):  # noqa: N818 - no error: another process ran out of memory
    """What ends an attempt on a process that itself had memory enough."""


class MicroBatches:
    """How one run splits its batches.

    Args:
        spec: How many samples a part has at most, or "auto" to find it by running out of memory.
        engine: The run's, once it has prepared the task.
        show: Whether to print what was found, to stderr.

    Attributes:
        size: Samples of a training part, at most; None while none has run out of memory.
        evaluation_size: The same for evaluations and predictions, of this process.

    Raises:
        ConfigError: The task's step is a generator.
    """

    def __init__(self, spec: int | str, engine: Engine, show: bool = False) -> None:
        self.searches = spec == AUTO
        self.size: int | None = None if isinstance(spec, str) else int(spec)
        self.evaluation_size: int | None = None
        self._engine = engine
        self._weigh = measure_of(engine.task).weight
        self._ranks = engine.ranks
        self._show = show and engine.ranks.rank == 0
        self._told: int | None = None
        self._trying = False  # whether forward and backward run, after which nothing can be undone
        self._learns = False
        self._attempted: list[Any] = []
        self._largest = 0
        self._whole = 0
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._shares_buffers = self._ranks.size > 1 and any(True for _ in engine.task.buffers())
        if engine._interleaved and engine.updaters:
            raise ConfigError(
                f"micro_batch={spec!r}: {type(engine.task).__name__}.training_step is a generator, of which"
                " an optimizer may have stepped before memory runs out. Use a smaller batch with"
                " gradient_accumulation_steps"
            )

    def __str__(self) -> str:
        if self.searches:
            return "auto" if self.size is None else f"auto ({self.size} samples)"
        return f"{self.size} samples"

    # Training.

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """`Engine.train_step`, begun again with smaller parts for as long as memory runs out."""
        engine = self._engine
        if self._shares_buffers:  # as a wrapper does before its forward, which is not called here
            engine.synchronize_buffers()
        if not self.searches:
            return engine.train_step(micro_batches)
        streams = random.getstate(), np.random.get_state()
        self._keep_buffers()
        result = None
        while result is None:
            try:
                result = engine.train_step(micro_batches)
            except Exception as error:
                if not self._goes_on(error):
                    raise
                let_go(error)
            if result is None:
                self._undo()
                random.setstate(streams[0])
                np.random.set_state(streams[1])
        self._tell()
        return result

    def pairs(self, micro_batches: Sequence[MicroBatch]) -> tuple[Weighted, Everywhere | None]:
        """The parts of a window's micro-batches with their shares of its weight; see `window.shared`.

        Gradients are exchanged once, when all parts are done; so unlike whole micro-batches the parts need
        not be as many on each process, and those of weight zero are left out.
        """
        engine, total = self._engine, None
        if self._ranks.size == 1:
            pairs = weighted(micro_batches)
        else:
            pairs, total = shared(micro_batches, engine.data_ranks, engine._spare)
        self._learns = bool(pairs)
        self._whole = max(self._whole, *(each.samples for each in micro_batches))
        parts: Weighted = []
        for micro_batch, share in pairs:
            parts += self._shared_parts(micro_batch, share)
        if pairs and not parts:  # nothing to learn from on this process: something is run for a share of zero
            parts = [(self._parts(pairs[0][0], self.size)[0]._replace(weight=0.0), 0.0)]
        self._attempted = [each.batch for each, _ in parts]
        self._largest = max((batch_size(each) or 1 for each in self._attempted), default=0)
        self._trying = True
        return parts, total

    def complete(self) -> bool:
        """End the forwards and backwards of an update: agree that nobody ran out of memory, and average the
        gradients over all processes.

        Returns:
            Whether there is something to learn from.
        """
        if self._ranks.size > 1:
            if self.searches and self._ranks.total([0.0])[0]:
                self._shrink(failed=False)
                raise _BeginAgain
            self._trying = False
            if self._learns:
                self._engine.strategy.synchronize(self._engine._parameters)
        self._trying, self._attempted = False, []
        return self._learns

    def _parts(self, micro_batch: MicroBatch, size: int | None) -> list[MicroBatch]:
        if size is None:
            return [micro_batch]
        try:
            batches = split_batch(micro_batch.batch, size)
        except DataError as error:
            if self.searches:  # it may fit: another process, or a larger batch, has run out of memory
                return [micro_batch]
            error.add_note(f"drivetrain: asked for by micro_batch={size}")
            raise
        if len(batches) == 1:
            return [micro_batch]
        samples = [batch_size(each) or 0 for each in batches]
        weights = samples if self._weigh is None else _numbers([self._weigh(each) for each in batches])
        return [
            micro_batch._replace(batch=batch, weight=weight, samples=number, tokens=0)
            for batch, weight, number in zip(batches, weights, samples, strict=True)
        ]

    def _shared_parts(self, micro_batch: MicroBatch, share: float | Tensor | None) -> Weighted:
        if micro_batch.stand_in or not (isinstance(micro_batch.weight, Tensor) or micro_batch.weight):
            return []
        parts = self._parts(micro_batch, self.size)
        if len(parts) == 1:
            return [(micro_batch, share)]
        kept = [each for each in parts if each.weight]
        weight = sum(each.weight for each in kept)
        whole = 1.0 if share is None else share
        return [(each, whole * (each.weight / weight)) for each in kept]

    def _goes_on(self, error: Exception) -> bool:
        """Whether the update is begun again after an error, for which the size has then been lowered."""
        if isinstance(error, _BeginAgain):
            return True
        if not self._trying or not is_out_of_memory(error):
            return False
        if not self._can_shrink(error):
            return False
        if self._ranks.size > 1:
            self._ranks.total([1.0])
        self._shrink(failed=True)
        return True

    def _can_shrink(self, error: Exception) -> bool:
        if self._largest <= 1:
            error.add_note("drivetrain: not even a micro-batch of one sample fits")
            return False
        for batch in self._attempted:
            _refuse_whole(batch, self._largest // 2, error)
        return True

    def _shrink(self, failed: bool) -> None:
        # Of those that failed, the smallest: the others had memory enough for theirs.
        sizes = self._ranks.all_gather(self._largest if failed else None)
        self.size = max(1, min(each for each in sizes if each is not None) // 2)

    def _keep_buffers(self) -> None:
        # Where they stand goes along: a forward may put another tensor in a buffer's place.
        found = [
            (module, name, buffer)
            for module in self._engine.task.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer)
        ]
        if [id(buffer) for _, _, buffer in found] != [id(buffer) for _, _, buffer, _ in self._buffers]:
            self._buffers = [(*each, each[2].detach().clone()) for each in found]
            return
        with torch.no_grad():
            for _, _, buffer, copy in self._buffers:
                copy.copy_(buffer)

    def _undo(self) -> None:
        for parameter in self._engine._parameters:
            parameter.grad = None
        with torch.no_grad():
            for module, name, buffer, copy in self._buffers:
                buffer.copy_(copy)
                module._buffers[name] = buffer
        self._trying, self._attempted = False, []
        free_caches()

    def _tell(self) -> None:
        if self.size is None or self.size == self._told:
            return
        self._told = self.size
        words = f"micro-batch {self.size} of {self._whole} samples"
        _LOG.info(words)
        if self._show:
            print(words, file=sys.stderr, flush=True)

    # Evaluation and prediction, in which each process splits its own batches alone.

    def evaluation_steps(
        self, micro_batch: MicroBatch, number: int
    ) -> Iterator[tuple[MicroBatch, StepValues]]:
        """`Engine.evaluation_step` of a batch, or of its parts."""
        return self._each(micro_batch, lambda part: self._engine.evaluation_step(part, number))

    def predict_step(self, micro_batch: MicroBatch, number: int) -> Any:
        """What `Engine.predict_step` gives for a batch, of its parts put together, on the host."""
        outputs, sizes = [], []
        for part, output in self._each(
            micro_batch, lambda part: to_host(self._engine.predict_step(part, number))
        ):
            outputs.append(output)
            sizes.append(part.samples)
        return join_outputs(outputs, sizes)

    def _each(
        self, micro_batch: MicroBatch, step: Callable[[MicroBatch], T]
    ) -> Iterator[tuple[MicroBatch, T]]:
        waiting = self._parts(micro_batch, self.evaluation_size)
        while waiting:
            part = waiting[0]
            try:
                value = step(part)
            except Exception as error:
                samples = batch_size(part.batch) or 1
                if not self.searches or not is_out_of_memory(error) or samples <= 1:
                    raise
                _refuse_whole(part.batch, samples // 2, error)
                let_go(error)
                self.evaluation_size = samples // 2
                waiting[:1] = self._parts(part, self.evaluation_size)
                free_caches()
                continue
            del waiting[0]
            yield part, value
            del value

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The sizes found."""
        return {"size": self.size, "evaluation_size": self.evaluation_size}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` gave, or None; a size that the Trainer was given stays.

        Raises:
            CheckpointError: It is not that.
        """
        for name in ("size", "evaluation_size") if state is not None and self.searches else ():
            value = state.get(name) if isinstance(state, Mapping) else state
            if value is not None and (type(value) is not int or value < 1):
                raise CheckpointError(f"the checkpoint's micro_batch has the {name} {value!r}")
            setattr(self, name, value)


def split_batches(spec: int | str | None, engine: Engine, show: bool) -> None:
    """Have a run's engine, which has prepared its task, split batches as the Trainer was asked to; see
    `MicroBatches`.
    """
    if spec is not None:
        engine.split_batches(MicroBatches(spec, engine, show))


def _numbers(weights: Sequence[Any]) -> list[float]:
    """Weights on the host: a part of weight zero is to be left out, so that they are waited for."""
    if any(isinstance(each, Tensor) for each in weights):
        numbers: list[float] = torch.stack([torch.as_tensor(each).reshape(()) for each in weights]).tolist()
        return numbers
    return [float(each) for each in weights]


def _refuse_whole(batch: Any, size: int, error: Exception) -> None:
    """See that a batch that ran out of memory can be split.

    Raises:
        DataError: It cannot; says why, and what else helps.
    """
    if batch_size(batch) is None:
        raise DataError(f"a {type(batch).__name__} cannot be split by samples; {advice(True)}") from error
    try:
        split_batch(batch, size)
    except DataError as reason:
        raise DataError(f"out of memory, and {reason}; {advice(True)}") from error
