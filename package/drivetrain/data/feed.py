"""From a user's data to windows of micro-batches: what the training and evaluation loops read."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from drivetrain.data.bad import BAD
from drivetrain.data.batch import batch_size
from drivetrain.data.rounds import Evidence, SharedBatch
from drivetrain.data.share import Everywhere
from drivetrain.data.sources import Source
from drivetrain.data.split import check_division
from drivetrain.data.transfer import MicroBatch, Transfer
from drivetrain.data.workers import Following
from drivetrain.errors import ConfigError, DataError
from drivetrain.types import Batch

Count = Callable[[Batch], Any]
Compare = Callable[[Evidence | None], None]


@dataclass(frozen=True)
class Measure:
    """How a batch is counted; None stands for the default.

    Attributes:
        weight: What the loss is a mean over; default is the number of samples.
        tokens: The number of tokens; default is not to count them.
    """

    weight: Count | None = None
    tokens: Count | None = None


class Window(NamedTuple):
    """The micro-batches of one update.

    Attributes:
        micro_batches: On the device, in order.
        last: Whether it is the last window of its epoch.
    """

    micro_batches: list[MicroBatch]
    last: bool


class Feed:
    """A source, counted, grouped into windows and brought to the device.

    Args:
        source: Where batches come from.
        transfer: Brings them to the device.
        measure: How they are counted.
        accumulation: Micro-batches per window.
        limit: At most this many micro-batches an epoch; None for all.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        measure: Measure | None = None,
        accumulation: int = 1,
        limit: int | None = None,
    ) -> None:
        self.source = source
        self.accumulation = accumulation
        self._transfer = transfer
        self._measure = measure or Measure()
        self._limit = limit
        self._state: dict[str, Any] | None = None
        self._compare: Compare | None = None
        self._begun_at = (0, 0)
        self._waits_for: int | None = None  # a batch, counted from there on
        self.leaves_out_bad = False

    def leave_out_bad(self) -> None:
        """Give a batch that cannot be made as one without weight, of which all processes are told.

        Raises:
            DataError: What comes after such a batch cannot be read.
        """
        self.source.leave_out_bad()
        self.leaves_out_bad = True

    def waiting(self) -> str | None:
        """Which batch is waited for, and who makes it; None while none is. Called in any thread."""
        (epoch, position), number = self._begun_at, self._waits_for
        return None if number is None else self.source.waiting(epoch, self._number(position, number, False))

    def compare_first(self, compare: Compare) -> None:
        """Have the first round that is read shown to `compare`: its evidence, or None without one."""
        self._compare, self.source.shows = compare, True

    @property
    def samples_per_update(self) -> int | None:
        """Samples of a whole window of all processes, as far as the data says; else None."""
        size, share = self.source.batch_size, self.source.share.size
        return None if size is None else size * share * self.accumulation

    @property
    def batches_per_epoch(self) -> int | None:
        """Micro-batches in an epoch; None when that is not known."""
        count = self.source.count()
        if self._limit is None or count is None:
            return count
        return min(count, self._limit)

    @property
    def updates_per_epoch(self) -> int | None:
        """Windows in an epoch; None when that is not known."""
        count = self.batches_per_epoch
        return None if count is None else -(-count // self.accumulation)

    def begin(self, epoch: int = 0, position: int = 0, done: int = 0, until: int | None = 0) -> None:
        """Have workers make the batches that `windows` gives with the same arguments.

        Raises:
            DataError: The sampler raised, or the workers cannot be started.
        """
        self._begin(epoch, position, self._left(done), until)

    def _begin(self, epoch: int, position: int, limit: int | None, until: int | None) -> None:
        if limit is None or limit > 0:
            self.source.begin(epoch, position, limit, Following(until, self._limit))

    def _left(self, done: int) -> int | None:
        return None if self._limit is None else self._limit - done

    @property
    def advice(self) -> str:
        """What to do where batches come too slowly."""
        return self.source.advice

    def close(self) -> None:
        """End the workers, if there are any; reading again starts others."""
        self.source.close()

    def micro_batches(
        self, epoch: int = 0, position: int = 0, limit: int | None = None, until: int | None = 0
    ) -> Iterator[MicroBatch]:
        """The counted micro-batches of an epoch from a position on, on the device."""
        limit = self._limit if limit is None else limit
        self._begin(epoch, position, limit, until)
        read = self._counted if self.source.share.size == 1 else self._counted_of_all
        counted = read(epoch, position, limit)
        return self._transfer.ahead(counted, early=not self.source.stateful)

    def windows(
        self, epoch: int, position: int = 0, done: int = 0, until: int | None = 0
    ) -> Generator[Window, None, None]:
        """The windows of an epoch from a position on; the last one may be short and is marked.

        Args:
            epoch: Which epoch.
            position: Where to begin; see `Source`.
            done: Micro-batches already used in this epoch, for the limit.
            until: The first epoch that is not read after it, so that workers can go on until then; None where
                nobody knows.

        Raises:
            DataError: No batch at all, a batch of an unknown kind, or data that raised.
        """
        limit = self._left(done)
        left = self.source.count(position) if self.source.exact else None
        if left is not None and limit is not None:
            left = min(left, limit)
        micro_batches = self.micro_batches(epoch, position, limit, until)
        size = self.accumulation
        if left is None:
            yield from self._looking_ahead(micro_batches, size)
            return
        window: list[MicroBatch] = []
        for micro_batch in micro_batches:
            left -= 1
            window.append(micro_batch)
            if left == 0 or len(window) == size:
                yield Window(window, left == 0)
                window = []

    def _looking_ahead(self, micro_batches: Iterator[MicroBatch], size: int) -> Generator[Window, None, None]:
        # Without a length, whether a window is the last shows only when the next batch is asked for. The
        # data's own state is taken before that, as it must not count a batch that no update has used.
        window: list[MicroBatch] = []
        self._state = self.source.snapshot()
        for micro_batch in micro_batches:
            if len(window) == size:
                yield Window(window, False)
                window = []
            window.append(micro_batch)
            if len(window) == size:
                self._state = self.source.snapshot()
        if window:
            self._state = self.source.snapshot()
            yield Window(window, True)
        self._state = None

    def snapshot(self) -> dict[str, Any] | None:
        """The data's own state as of the last window handed out; to be called by all processes."""
        return self.source.gathered(self._state if self._state is not None else self.source.snapshot())

    def restore(self, state: dict[str, Any] | None, position: int) -> None:
        """Take over what `snapshot` gave.

        Args:
            state: The data's own state.
            position: Where in its epoch the run stands.

        Raises:
            CheckpointError: It is of data that is divided in another way.
        """
        check_division(self.source, state, position)
        self.source.restore(state)

    def _counted(self, epoch: int, position: int, limit: int | None) -> Iterator[MicroBatch]:
        weigh, count_tokens = self._measure.weight, self._measure.tokens
        number = 0
        if limit is not None and limit <= 0:
            return
        self._begun_at, self._waits_for = (epoch, position), 0
        fetched: Iterator[tuple[Batch, int, int | None]] = self.source.batches(epoch, position)  # type: ignore[assignment]
        try:
            for batch, advance, samples in fetched:
                self._waits_for = None
                if batch is BAD:
                    counted = MicroBatch(None, 0.0, 0, 0, advance, True, None, True)
                else:
                    if samples is None:
                        samples = batch_size(batch)
                        if samples is None:
                            raise self._unknown_kind(batch, epoch, self.source.number(position) + number)
                    weight: float | Tensor = samples if weigh is None else _on_host(weigh(batch))
                    if weigh is not None and not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
                        raise self._bad_weight(weight, epoch, self.source.number(position) + number)
                    tokens = 0 if count_tokens is None else int(count_tokens(batch))
                    counted = MicroBatch(batch, weight, samples, tokens, advance)
                number += 1
                yield counted
                if number == limit:
                    return
                self._waits_for = number
        finally:
            self._waits_for = None
        if number == 0 and position == 0:
            raise self._empty(epoch)

    def _counted_of_all(self, epoch: int, position: int, limit: int | None) -> Iterator[MicroBatch]:
        """As `_counted`, where several processes read the data together."""
        number = 0
        if limit is not None and limit <= 0:
            return
        self._begun_at, self._waits_for = (epoch, position), 0
        rounds: Iterator[SharedBatch] = self.source.batches(epoch, position)  # type: ignore[assignment]
        try:
            for fetched in rounds if self._compare is None else self._compared(rounds, self._compare):
                self._waits_for = None
                counted = self._of_round(fetched, epoch, position, number)
                number += 1
                yield counted
                if number == limit:
                    return
                self._waits_for = number
        finally:
            self._waits_for = None
        if number == 0 and position == 0:
            raise self._empty(epoch)

    def _of_round(self, fetched: SharedBatch, epoch: int, position: int, number: int) -> MicroBatch:
        weigh, count_tokens = self._measure.weight, self._measure.tokens
        batch, advance, samples, stand_in, known, _ = fetched
        if batch is BAD:
            return MicroBatch(None, 0.0, 0, 0, advance, True, None, not stand_in)
        samples = batch_size(batch) if samples is None else samples
        if samples is None:
            raise self._unknown_kind(batch, epoch, self._number(position, number, stand_in))
        weight: float | Tensor = samples if weigh is None else _on_host(weigh(batch))
        if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise self._bad_weight(weight, epoch, self._number(position, number, stand_in))
        tokens = 0 if count_tokens is None else int(count_tokens(batch))
        everywhere = None
        if self.leaves_out_bad:
            weight = float(weight)  # also one on a device: the process whose batch is bad has none there
        elif known is not None and weigh is None and count_tokens is None:
            everywhere = Everywhere(known, known, 0)
        if stand_in:  # of the same kind, as a weight may be on the device
            weight, samples, tokens = weight * 0, 0, 0
        return MicroBatch(batch, weight, samples, tokens, advance, stand_in, everywhere)

    def _compared(self, rounds: Iterator[SharedBatch], compare: Compare) -> Iterator[SharedBatch]:
        self._compare = None
        first = next(rounds, None)
        compare(None if first is None else first.evidence)
        return rounds if first is None else chain((first,), rounds)

    def _number(self, position: int, round_: int, stand_in: bool) -> int:
        """Which batch of its epoch this process has in a round counted from a position on."""
        if self.source.apart:
            return position + round_
        share = self.source.share
        return self.source.number(position) + round_ * share.size + (0 if stand_in else share.rank)

    def _bad_weight(self, weight: float, epoch: int, number: int) -> DataError:
        return DataError(
            f"loss_weight gave {weight} for batch {number} of epoch {epoch} of the {self.source.name} data;"
            " a weight is a number of samples or tokens, 0 or more"
        )

    def _empty(self, epoch: int) -> DataError:
        return DataError(
            f"the {self.source.name} data is empty: it gave no batch in epoch {epoch}. A dataset smaller"
            " than its batch size with drop_last=True does that; so does an iterator that was used up"
            " before"
        )

    def _unknown_kind(self, batch: Batch, epoch: int, number: int) -> DataError:
        inside = (
            f" of {', '.join(sorted({type(value).__name__ for value in batch}))}"
            if isinstance(batch, (list, tuple))
            else ""
        )
        return DataError(
            f"batch {number} of epoch {epoch} of the {self.source.name} data is a"
            f" {type(batch).__name__}{inside} with no tensor in it whose first dimension could count samples."
            " A batch is a tensor, a mapping, a sequence or a dataclass of tensors; use a collate_fn that"
            " makes one"
        )


def _on_host(weight: Any) -> float | Tensor:
    # A weight on an accelerator stays there: reading it would wait for the device in every step.
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return weight
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ConfigError(
            f"loss_weight gave {given[:80]}; it gives one number, what the batch's loss is a mean over"
        ) from None
