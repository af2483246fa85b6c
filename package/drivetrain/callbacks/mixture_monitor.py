"""The samples, the tokens and the loss of each source of a mixture among the logged values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Batch
from drivetrain.data import MicroBatch
from drivetrain.data.orders.mixing import SOURCE, Mixture, MixtureStream
from drivetrain.data.protocols import length_of
from drivetrain.task.output import wide_dtype

if TYPE_CHECKING:
    from drivetrain.run.run import Run


class MixtureMonitor(Callback):
    """Adds values of each source of a mixture to the log points, over all ranks, by the source's name.

    - ``train/samples/web``: the samples of "web" since the run began;
    - ``train/epoch/web``: these samples over the length of "web", if it has one;
    - ``train/loss/web``: the mean of its `losses` since the last log point;
    - ``train/tokens/web``: its tokens since the run began, if `losses` counts tokens.

    The mean loss of a batch with several sources belongs to none of them. So a loss by source needs a
    function that returns a loss for each sample. It is called once for each micro-batch, without gradients.
    Nothing here waits for the device between log points.

    Args:
        sources: The mapping of names to sources that `drivetrain.data.mixture` was given.
        losses: A function of a micro-batch's outputs and its batch. It returns the loss of each sample, a
            tensor of shape (samples,), or two such tensors: the sum of the losses of each sample's tokens,
            and the number of these tokens. None logs no losses.

    Raises:
        ConfigError: `sources` is no such mapping, or not that of the training data; or, in the first step, a
            batch has no entry "source", the step returns no outputs, or `losses` returns another shape.
    """

    def __init__(self, sources: Mapping[str, Any], losses: Callable[[Any, Batch], Any] | None = None) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigError('MixtureMonitor takes the sources by name, such as {"web": web, "code": code}')
        self.names = list(sources)
        self._lengths = [length_of(each) for each in sources.values()]
        if losses is not None and not callable(losses):
            raise ConfigError(f"MixtureMonitor(losses=) takes a function (outputs, batch), not {losses!r}")
        self._losses = losses
        self._by_token = False

    def wrap_run(self, run: Run) -> AbstractContextManager[object]:
        """Begin to count, before a checkpoint is loaded."""
        data = None if run.train_feed is None else getattr(run.train_feed.source.loader, "dataset", None)
        if isinstance(data, (Mixture, MixtureStream)) and data.names != self.names:
            raise ConfigError(
                f"MixtureMonitor has the sources {self.names}, and the mixture {data.names}, in this order."
                " Give it the mapping that mixture() was given"
            )
        self._ranks, device = run.engine.data_ranks, run.engine.device
        self._before: Mapping[str, Any] = {}
        self._samples = Counter[int]()
        self._step = torch.zeros(2, len(self.names), dtype=wide_dtype(device), device=device)
        self._tokens = self._step[1].clone()
        if run.engine.splitter is not None:  # an attempt that ran out of memory does not count
            run.engine.splitter.begun_again.append(self._step.zero_)
        return nullcontext()

    def on_step_start(self, run: Run) -> None:
        """Find the sources of the step's samples."""
        self._found = Counter(self._numbers(run.window.micro_batches))
        self._step.zero_()

    def _numbers(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Return the numbers of the samples' sources, from batches on the host."""
        found: list[int] = []
        for each in micro_batches:
            if not (each.is_placeholder or each.bad):
                column = each.batch.get(SOURCE) if isinstance(each.batch, Mapping) else None
                found += column.tolist() if isinstance(column, Tensor) else [-1]
        if not {*found} <= {*range(len(self.names))}:
            raise ConfigError(
                f"MixtureMonitor needs batches that are mappings with an entry {SOURCE!r}, the numbers of"
                f" their samples' sources among {self.names}. Give it the mapping that mixture() was given"
            )
        return found

    def on_micro_batch_end(self, run: Run) -> None:
        """Add the losses of a micro-batch to those of the step."""
        if self._losses is None:
            return
        if run.outputs is None:
            raise ConfigError("MixtureMonitor(losses=) needs a step that returns StepOutput(loss, outputs)")
        with torch.no_grad(), (run.engine.step_module.context or nullcontext)():
            found = self._losses(run.outputs, run.batch)
        self._by_token, sources = isinstance(found, tuple), run.batch[SOURCE]
        pair = found if self._by_token else (found, torch.ones_like(sources))
        shapes = [[*each.shape] if isinstance(each, Tensor) else each for each in pair]
        if wrong := [each for each in shapes if each != [len(sources)]]:
            raise ConfigError(f"MixtureMonitor(losses=...) returned a shape {wrong[0]}, not [{len(sources)}]")
        is_own = sources[:, None] == torch.arange(len(self.names), device=sources.device)
        values = torch.stack([each.to(self._step.dtype) for each in pair])[:, :, None]
        self._step += torch.where(is_own, values, 0).sum(1)  # not index_add_, whose order varies on a GPU

    def on_step_end(self, run: Run) -> None:
        """Count the samples, and add the losses to the means of the next log point."""
        self._samples += self._found
        if self._losses is None:
            return
        sums, weights = self._step.clone()
        self._tokens += weights
        if run.result.applied:  # type: ignore[union-attr]
            named = {index: (f"loss/{self.names[index]}",) for index in sorted(self._found)}
            rows = [(name, sums[index] / weights[index], weights[index]) for index, name in named.items()]
            run.engine.buffer.add(rows, run.result.step)  # type: ignore[union-attr]

    def on_log(self, run: Run) -> None:
        """Log the counts of all ranks."""
        counts = self.state_dict() if run.stage == "train" else {}
        for (name, (samples, tokens)), length in zip(counts.items(), self._lengths, strict=False):
            run.log(f"train/samples/{name}", samples)
            if length:
                run.log(f"train/epoch/{name}", samples / length)
            if self._by_token:
                run.log(f"train/tokens/{name}", tokens)

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and the tokens of each source on all ranks, which all call it."""
        count = len(self.names)
        own = self._ranks.total([*(self._samples[each] for each in range(count)), *self._tokens.tolist()])
        pairs = [(self._before.get(name, (0, 0)), own[index::count]) for index, name in enumerate(self.names)]
        return {name: [*map(add, *pair)] for name, pair in zip(self.names, pairs, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._before = state
