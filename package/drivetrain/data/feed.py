"""Windows of micro-batches from a user's data, as the training and evaluation loops read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.intervals import exact
from drivetrain.core.messages import logger
from drivetrain.core.progress import Progress
from drivetrain.core.stages import Stages, most
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size, first_dimensions
from drivetrain.data.fingerprint import Fingerprint, matches, of_samples
from drivetrain.data.rank_rounds import Evidence, SharedBatch
from drivetrain.data.shard import Everywhere
from drivetrain.data.skipped_batches import BAD
from drivetrain.data.sources import Source
from drivetrain.data.split_source import check_division
from drivetrain.data.transfer import MicroBatch, Transfer
from drivetrain.data.window_plan import Place, WindowPlan
from drivetrain.data.workers.pool import LookAhead

_LOG = logger(__name__)

Count = Callable[[Batch], Any]
Compare = Callable[[Evidence | None], None]
Cut = Callable[[Batch, int], Batch]

_STEPS = "gradient_accumulation_steps"

_ALONE = (False, None, None)
"""What a `SharedBatch` says of its round, where one process reads alone."""


@dataclass(frozen=True)
class Measure:
    """Functions that count a batch; None uses the default.

    Attributes:
        weight: Returns the batch's weight in the loss; the default is the number of samples.
        tokens: Returns the number of tokens; the default does not count them.
    """

    weight: Count | None = None
    tokens: Count | None = None


class Window(NamedTuple):
    """The micro-batches of one step.

    Attributes:
        micro_batches: On the host, in order; `Transfer.moving` moves them to the device.
        last: Whether it is the last window of its epoch.
        waited: The seconds that reading for `last` took.
    """

    micro_batches: list[MicroBatch]
    last: bool
    waited: float = 0.0


class StreamWindow:
    """The same of data without a length.

    Args:
        ends: Reads the next batch, and returns whether there is none.

    Attributes:
        micro_batches: As those of `Window`.
        waited: As that of `Window`.
    """

    __slots__ = ("_ends", "_last", "micro_batches", "waited")

    def __init__(self, micro_batches: list[MicroBatch], ends: Callable[[], bool]) -> None:
        self.micro_batches, self._ends = micro_batches, ends
        self._last: bool | None = None
        self.waited = 0.0

    @property
    def last(self) -> bool:
        """Whether it is the last window. The first to ask reads the next batch, which is made from what there
        is then: ask once the step is made, on all ranks together.
        """
        if self._last is None:
            start = perf_counter()
            self._last = self._ends()
            self.waited = perf_counter() - start
        return self._last


class Feed:
    """A source's batches, counted, grouped into windows and moved to the device.

    Args:
        source: The batches.
        transfer: Moves them to the device.
        measure: Counts them.
        accumulation: Micro-batches per window, or their stages.
        limit: The maximum number of micro-batches in an epoch, or the fraction of them; None for all.
        batch_sizes: The stages of the source's batch size; None if it does not change.
        progress: The run's progress, for what changes during it; None for a run at its start.

    Attributes:
        accumulation: The largest number of micro-batches per window.
        plan: The sizes of the windows, if anything changes during a run.

    Raises:
        ConfigError: A fraction of data whose length is not known, or stages in samples of data whose samples
            are not known.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        measure: Measure | None = None,
        accumulation: int | Mapping[Any, int] = 1,
        limit: float | None = None,
        batch_sizes: Stages | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.accumulation = most(accumulation)
        self._transfer = transfer
        # Whether the first tensor of a batch decides what its loss counts, which is then looked at once.
        self._checks_samples = not source.knows_samples and measure is not None and measure.weight is None
        self._measure = measure or Measure()
        self._given_limit = limit
        if limit is not None:
            _whole(limit, source)  # which may be impossible
        self._length = self._length_now()
        self._state: dict[str, Any] | None = None
        self._next: MicroBatch | None = None  # the batch after the last window yielded, if it was drawn
        self._expected: list[Fingerprint] | None = None
        self._left_early = False  # whether the last epoch was left before its data ended
        self._compare: Compare | None = None
        self._begun_at = (0, 0)
        self._waits_for: int | None = None  # a batch's number, counted from `_begun_at`
        self.skips_bad_batches = False
        self._progress = Progress() if progress is None else progress
        self._cut: Cut | None = None
        self._length_told = False
        self.plan: WindowPlan | None = None
        if batch_sizes is not None or isinstance(accumulation, Mapping):
            self.plan = self._make_plan(accumulation, batch_sizes)

    @property
    def limit(self) -> int | None:
        """The maximum number of micro-batches in an epoch; None for all."""
        return None if self._given_limit is None else _whole(self._given_limit, self.source)

    def _length_now(self) -> int | None:
        source = self.source
        return source.count() if source.samples_per_epoch is None else source.samples_per_epoch

    def skip_bad_batches(self) -> None:
        """Give a micro-batch of weight zero for one that cannot be made; all processes take part in it.

        Raises:
            DataError: The data cannot be read on after such a batch.
        """
        self.source.skip_bad_batches()
        self.skips_bad_batches = True

    def waiting(self) -> str | None:
        """Return which batch is waited for, and who makes it; None if none is. Any thread may call it."""
        (epoch, position), number = self._begun_at, self._waits_for
        return None if number is None else self.source.waiting(epoch, self._number(position, number, False))

    def compare_first(self, compare: Compare) -> None:
        """Call `compare` with the evidence of the first round, or with None if there is no batch."""
        self._compare, self.source.needs_evidence = compare, True

    def _make_plan(
        self, accumulation: int | Mapping[Any, int], batch_sizes: Stages | None = None
    ) -> WindowPlan:
        source = self.source
        samples, size = source.samples_per_epoch, 1
        if samples is not None and source.batch_size is not None:
            size = source.batch_size
        plan = WindowPlan(
            Stages(_STEPS, accumulation),
            batch_sizes or Stages("batch_size", size),
            samples=samples,
            rounds=None if samples is not None else source.count(),
            shards=source.shard.size,
            limit=self.limit,
        )
        if batch_sizes is not None:
            source.follow(plan)
        _check_unit(_STEPS, plan.batches, plan)
        return plan

    def cut(self, lengths: Stages, cut: Cut, name: str) -> None:
        """Pass each batch, with the number that holds for it, through a function before it is counted.

        Args:
            lengths: The numbers.
            cut: Returns the batch to use instead.
            name: The name of the numbers, for messages.

        Raises:
            ConfigError: They change after samples, and the samples of this data are not known; or batches are
                cut already.
        """
        if self._cut is not None:
            raise ConfigError(f"two {name}s would cut the same batches. Give one")
        plan = self._make_plan(self.accumulation) if self.plan is None else self.plan
        _check_unit(name, lengths, plan)
        plan.lengths = lengths
        self.plan, self._cut = plan, cut

    @property
    def samples_per_step(self) -> int | None:
        """The number of samples of a whole window over all processes, at the start of a run; None if
        unknown.
        """
        size, shard = self.source.batch_size, self.source.shard.size
        steps = self.accumulation if self.plan is None else self.plan.batches.first
        return None if size is None else size * shard * steps

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of micro-batches in an epoch, of the current one if it changes; None if unknown."""
        if self.plan is not None and len(self.plan.batch_size) > 1:
            return self.plan.rounds_in(self._progress.epoch)
        count = self.source.count()
        if self.limit is None or count is None:
            return count
        return min(count, self.limit)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of windows in an epoch; None if unknown, or if `plan` has it by epoch."""
        if self.plan is not None and self.plan.varies:
            return None
        count = self.batches_per_epoch
        return None if count is None else -(-count // self.accumulation)

    def begin(self, epoch: int = 0, position: int = 0, done: int = 0, until: int | None = 0) -> None:
        """Let workers begin with the batches that `windows` yields with the same arguments.

        Raises:
            DataError: The sampler raised, or the workers cannot be started.
        """
        self._begin(epoch, position, self._left(done), until, done)

    def _begin(self, epoch: int, position: int, limit: int | None, until: int | None, done: int = 0) -> None:
        if self.plan is not None:
            self.plan.begin(self._place(epoch, position, done))
        if limit is None or limit > 0:
            self.source.begin(epoch, position, limit, LookAhead(until, self.limit))

    def _place(self, epoch: int, position: int, done: int) -> Place:
        """Return a position of an epoch as a place in the plan."""
        progress, plan = self._progress, self.plan
        assert plan is not None
        if not plan.counts_samples:  # positions of such data are its own
            left = self.source.count(position) if self.source.exact else None
            position = done if left is None else (self.source.count() or 0) - left
        return Place(epoch, position, done, progress.steps + progress.skipped, progress.samples)

    def _left(self, done: int) -> int | None:
        return None if self.limit is None else self.limit - done

    def close(self) -> None:
        """End the workers, if there are any; reading again starts new ones."""
        self.source.close()

    def micro_batches(
        self,
        epoch: int = 0,
        position: int = 0,
        limit: int | None = None,
        until: int | None = 0,
        done: int = 0,
        move: bool = True,
    ) -> Iterator[MicroBatch]:
        """Return the counted micro-batches of an epoch from a position on, on the device if they `move`."""
        limit = self.limit if limit is None else limit
        self._begin(epoch, position, limit, until, done)
        counted = self._counted(epoch, position, limit)
        early = self.source.made_ahead and not self.source.stateful
        return self._transfer.ahead(counted, early) if move else counted

    def windows(
        self, epoch: int, position: int = 0, done: int = 0, until: int | None = 0
    ) -> Generator[Window | StreamWindow, None, None]:
        """Yield the windows of an epoch from a position on; the last one may be short and is marked.

        Args:
            epoch: The epoch.
            position: Where to begin; see `Source`.
            done: Micro-batches already used in this epoch, for the limit.
            until: The end of the range of epochs that are read next, so that workers can prepare them; None
                if it is unknown.

        Raises:
            DataError: There is no batch at all, a batch is of an unknown kind, or the data raised.
        """
        limit = self._left(done)
        source, transfer = self.source, self._transfer
        state = None
        if self._left_early and source.stateful and not position:
            # A run that resumes here loads the state too, so both continue from the same state.
            state = source.snapshot()
            source.ranks.in_turn(lambda: source.restore(state))
        self._left_early = True
        micro_batches = self.micro_batches(epoch, position, limit, until, done, move=False)
        left = source.count(position) if source.exact else None
        if left is not None:
            self._note_length(epoch)
            left = left if limit is None else min(left, limit)
        transfer.following, self._next = None, None
        if left == 0:
            next(micro_batches, None)  # raises if there is no data at all
            return
        if left is None:
            if self._expected is not None and (limit is None or limit > 0):
                micro_batches = self._as_expected(micro_batches, position)
            source.seed_epoch(epoch)
            # The data's state is taken before the next batch is asked for, because it must not count a batch
            # that no step has used.
            self._state = source.snapshot() if state is None else state
        ahead = source.made_ahead and transfer.draws_ahead and not (source.stateful and left is not None)
        drawn: list[MicroBatch] = []

        def ends() -> bool:
            """Read the next batch, which alone shows whether data without a length goes on."""
            drawn[:] = islice(micro_batches, 1)
            self._next = drawn[0] if drawn else None
            if not drawn:
                self._state = source.snapshot()
            return not drawn

        for size, last in self._sizes(left):
            window = [*drawn, *islice(micro_batches, size - len(drawn))]
            if not window or (left is not None and len(window) < size):
                return
            drawn.clear()
            if left is None:
                self._state = source.snapshot()
            if ahead:
                if left is not None:
                    transfer.begin(window[0])  # before the next is drawn: data may fill the same tensor again
                if last is None:
                    last = ends()
                elif not last:
                    drawn += islice(micro_batches, 1)
                transfer.following = drawn[0] if drawn else None
            made = StreamWindow(window, ends) if last is None else Window(window, last)
            yield made
            if left is None and made.last:
                break
        self._state = None

    def _note_length(self, epoch: int) -> None:
        """Say once that data of known length has another one than at the start.

        Raises:
            DataError: The sizes of the windows were planned for that one.
        """
        now = self._length_now()
        if now == self._length:
            return
        what = (
            f"the {self.source.name} data has the length {now} in epoch {epoch} and had {self._length} before"
        )
        if self.plan is not None:
            raise DataError(
                f"{what}, and the stages of a batch size, of gradient_accumulation_steps or of a sequence"
                " length are planned for that. Use one number instead of stages, or data of one length"
            )
        if not self._length_told and self.source.shard.rank == 0:
            self._length_told = True
            _LOG.info(
                f"{what}. Schedules, and intervals in parts of an epoch, stay as they were planned at the"
                " start"
            )

    def _sizes(self, left: int | None) -> Iterator[tuple[int, bool | None]]:
        """Return the micro-batches of each window, and whether it is the last; None if only the data knows.

        Args:
            left: The micro-batches of the epoch that are left; None if that is unknown.
        """
        if left is None:
            sizes = repeat(self.accumulation) if self.plan is None else self.plan.endless()
            return zip(sizes, repeat(None))
        if self.plan is not None:
            return self.plan.windows()
        before = max(0, -(-left // self.accumulation) - 1)
        rest = left - before * self.accumulation
        return chain(repeat((self.accumulation, False), before), ((rest, True),))

    def snapshot(self) -> dict[str, Any] | None:
        """Return the data's state as of the last window yielded; all processes must call it."""
        return self.source.gathered(self._state if self._state is not None else self.source.snapshot())

    def continuation(self) -> dict[str, Any] | None:
        """Return how the data was read and what it gives next; all processes must call it.

        It belongs to the last window yielded, as `snapshot`.
        """
        following, reading, samples = self._next, self.source.reading(), None
        if following is not None and not (following.is_placeholder or following.bad or reading.get("order")):
            samples = of_samples(following.batch, following.samples)
        return self.source.gathered({**reading, "next": samples})

    def restore(
        self, state: dict[str, Any] | None, position: int, continuation: dict[str, Any] | None = None
    ) -> None:
        """Restore the result of `snapshot`; all processes must call it.

        A stream's first batch is then compared with the one that came next when the state was saved, and the
        order of a dataset with the order before.

        Args:
            state: The data's state.
            position: The run's position in its epoch.
            continuation: The result of `continuation`.

        Raises:
            CheckpointError: The state is of data that was divided differently, or that has no state and was
                read with other settings.
        """
        source = self.source
        check_division(source, state, position)
        before = source.own_part(continuation)
        if before is not None:
            source.check_reading(before, position)
            self._expected = before["next"] if position else None
        if source.stateful and state is not None:
            # One at a time: some packages keep the state in memory that a machine's ranks share.
            source.ranks.in_turn(lambda: source.restore(source.own_part(state)))

    def _as_expected(self, micro_batches: Iterator[MicroBatch], position: int) -> Iterator[MicroBatch]:
        """Warn if the data does not continue where the checkpoint was saved."""
        expected, self._expected = self._expected or [], None
        first = next(micro_batches, None)
        found: list[Fingerprint] = []
        if first is not None and not first.is_placeholder:
            found = of_samples(first.batch, first.samples)
        pairs = list(zip(expected, found, strict=False))  # the batch size may have changed
        other = next(((one, now) for one, now in pairs if not matches(one, now)), None)
        if expected and (not found or other is not None):
            self.source.report_other_order(position, other)
        return iter(()) if first is None else chain((first,), micro_batches)

    def _counted(self, epoch: int, position: int, limit: int | None) -> Iterator[MicroBatch]:
        """Yield the counted micro-batches of this process."""
        weigh, count_tokens, cut = self._measure.weight, self._measure.tokens, self._cut
        number, checked = 0, -1
        counted: MicroBatch | None = None
        if limit is not None and limit <= 0:
            return
        lengths = self._lengths()
        self._begun_at, self._waits_for = (epoch, position), 0
        fetched: Iterator[Any] = self.source.batches(epoch, position)
        if self._compare is not None and self.source.shard.size > 1:
            fetched = self._compared(fetched, self._compare)
        try:
            for batch, advance, samples, *of_round in fetched:
                self._waits_for = None
                is_placeholder, known, _ = of_round or _ALONE
                length = 0 if cut is None else next(lengths)
                if batch is BAD:
                    counted = MicroBatch(None, 0.0, 0, 0, advance, True, None, not is_placeholder)
                else:
                    if cut is not None:
                        batch = cut(batch, length)
                    if samples is None:
                        samples = batch_size(batch)
                        if samples is None:
                            raise self._unknown_kind(
                                batch, epoch, self._number(position, number, is_placeholder)
                            )
                    weight: float | Tensor = samples if weigh is None else _on_host(weigh(batch))
                    if weigh is not None and not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
                        raise self._bad_weight(weight, epoch, self._number(position, number, is_placeholder))
                    tokens = 0 if count_tokens is None else _tokens(count_tokens(batch))
                    everywhere = None
                    if of_round and self.skips_bad_batches:
                        # Even on a device: a process with a bad batch has no tensor there.
                        weight = float(weight)
                    elif known is not None and weigh is None and count_tokens is None:
                        everywhere = Everywhere(known, known, 0)
                    if is_placeholder:  # multiplied, because a weight may be a tensor on the device
                        weight, samples, tokens = weight * 0, 0, 0
                    counted = MicroBatch(batch, weight, samples, tokens, advance, is_placeholder, everywhere)
                if samples != checked and self._checks_samples:
                    checked = samples
                    self._check_samples(counted)
                number += 1
                yield counted
                if number == limit:
                    return
                self._waits_for = number
        finally:
            self._waits_for = None
            # Of one size, all batches but the last agree with a table that has as many rows as they have.
            if self._checks_samples and counted is not None:
                self._check_samples(counted)
        self._left_early = False
        if number == 0 and position == 0:
            raise self._empty(epoch)

    def _check_samples(self, micro: MicroBatch) -> None:
        """Warn once if the tensors of a batch disagree about its number of samples.

        Looked at are an epoch's first batch, its last, and each that has another number than the one before.
        """
        found = {} if micro.bad or micro.batch is None else first_dimensions(micro.batch)
        if not found:
            return
        self._checks_samples = False
        if self.source.shard.rank == 0:
            listed = ", ".join(f"{name}: {size}" for name, size in list(found.items())[:8])
            _LOG.warning(
                f"the tensors of a batch of the {self.source.name} data differ in their first dimension"
                f" ({listed}). {batch_size(micro.batch)}, that of the first one, is taken as its number of"
                " samples, by which its loss is weighted against those of other batches. The task's"
                " loss_weight(batch), if it is defined, returns the number instead. If each item of a list is"
                " a single sample, pass DataLoader(data, batch_size=32)"
            )

    def _lengths(self) -> Iterator[int]:
        plan = self.plan
        return iter(()) if plan is None else plan.lengths_from(self.source.exact)

    def _compared(self, rounds: Iterator[SharedBatch], compare: Compare) -> Iterator[SharedBatch]:
        self._compare = None
        first = next(rounds, None)
        compare(None if first is None else first.evidence)
        return rounds if first is None else chain((first,), rounds)

    def _number(self, position: int, round_: int, is_placeholder: bool) -> int:
        """Return the number in its epoch of this process's batch in a round after a position."""
        if self.source.is_split:
            return position + round_
        shard = self.source.shard
        return self.source.number(position) + round_ * shard.size + (0 if is_placeholder else shard.rank)

    def _bad_weight(self, weight: float, epoch: int, number: int) -> DataError:
        return DataError(
            f"loss_weight gave {weight} for batch {number} of epoch {epoch} of the {self.source.name} data;"
            " a weight is a number of samples or tokens, at least 0"
        )

    def _empty(self, epoch: int) -> DataError:
        return DataError(
            f"the {self.source.name} data is empty: it gave no batch in epoch {epoch}. Possible reasons are a"
            " dataset smaller than its batch size with drop_last=True, and an iterator that was used up"
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
            f" {type(batch).__name__}{inside} with no tensor whose first dimension could count samples."
            " A batch is a tensor, a mapping, a sequence or a dataclass of tensors; use a collate_fn that"
            " makes one"
        )


def _check_unit(name: str, stages: Stages, plan: WindowPlan) -> None:
    if stages.unit == "samples" and not plan.counts_samples:
        raise ConfigError(
            f"{name}={stages!r} changes after samples, which needs training data that is a dataset with a"
            " length, read without a batch sampler of your own. Give the points in steps or epochs"
        )


def _whole(limit: float, source: Source) -> int:
    """Return a limit as a number of batches."""
    if not isinstance(limit, float):
        return limit
    count = None if source.is_split else source.count()
    if count is None:
        raise ConfigError(
            f"a limit of {limit} of the {source.name} batches needs data of known length, not divided by"
            " rank before. Give a number of batches"
        )
    return max(1, int(exact(limit) * count))


def _tokens(given: Any) -> int:
    """Return what `tokens` gave as a whole number."""
    try:
        number = given.item() if isinstance(given, Tensor) else given
        if (whole := int(number)) == number and whole >= 0:
            return whole
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    shown = f"a tensor of shape {tuple(given.shape)}" if getattr(given, "ndim", 0) else f"{given!r}"
    raise DataError(f"tokens gave {shown[:80]}; it must return a whole number of tokens, at least 0")


def _on_host(weight: Any) -> float | Tensor:
    # A weight on an accelerator stays there: reading it would be a host sync in every step.
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        return weight
    try:
        return float(weight)
    except (TypeError, ValueError, RuntimeError):
        given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ConfigError(
            f"loss_weight gave {given[:80]}; it must return one number, the weight of the batch's loss"
        ) from None
