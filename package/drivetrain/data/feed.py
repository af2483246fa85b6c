"""Windows of micro-batches from a user's data, as the training and evaluation loops read them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple

from drivetrain.core.calendar import Calendar, RunPosition
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.int_schedule import IntSchedule, most
from drivetrain.core.intervals import Every, exact
from drivetrain.core.messages import logger
from drivetrain.core.progress import Progress
from drivetrain.core.types import Batch
from drivetrain.data.batch import batch_size, first_dimensions
from drivetrain.data.counting import Measure, count_batch
from drivetrain.data.fingerprint import Fingerprint, as_text, matches, of_samples
from drivetrain.data.known_tokens import tokens_per_sample
from drivetrain.data.rank_rounds import Evidence, SharedBatch
from drivetrain.data.resumption import Resumption, leave_out
from drivetrain.data.sources import Source
from drivetrain.data.split_source import is_divided_alike
from drivetrain.data.transfer import MicroBatch, Transfer
from drivetrain.data.workers.pool import LookAhead

_LOG = logger(__name__)

Compare = Callable[[Evidence | None], None]
Cut = Callable[[Batch, int], Batch]


class Window(NamedTuple):
    """The micro-batches of one step.

    Attributes:
        micro_batches: On the host, in order; `Transfer.moving` moves them to the device.
        last: Whether it is the last window of its epoch.
        waited: The seconds spent on reading ahead to find out `last`.
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


class SizedEpoch:
    """An epoch of known length: the sizes of its windows, and which is the last, are known before it is read.

    Attributes:
        state: None: the data is resumed by its position.
        following: None: nothing is compared after a resume.
    """

    state: dict[str, Any] | None = None
    following: MicroBatch | None = None

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def windows(
        self, epoch: int, position: int, done: int, until: int | None
    ) -> Generator[Window | StreamWindow, None, None]:
        """Yield the windows of the epoch, as `Feed.windows`."""
        feed, source, transfer = self._feed, self._feed.source, self._feed.transfer
        limit = feed.left(done)
        micro_batches = feed.micro_batches(epoch, position, limit, until, done, move=False)
        feed.note_length(epoch)
        transfer.following = None
        ahead = source.made_ahead and transfer.draws_ahead
        drawn: list[MicroBatch] = []
        for size, last in feed.calendar.windows():
            window = [*drawn, *islice(micro_batches, size - len(drawn))]
            if len(window) < size:
                return
            if ahead:
                transfer.begin(window[0])  # before the next is drawn: data may fill the same tensor again
                drawn = [] if last else list(islice(micro_batches, 1))
                transfer.following = drawn[0] if drawn else None
            yield Window(window, last)
        next(micro_batches, None)  # raises if there is no data at all


class StreamEpoch:
    """An epoch that ends where its data does, which shows only when the next batch is read.

    Attributes:
        state: The data's own state as of the last window yielded. It is taken before the next batch is read,
            because it must not count a batch that no step has used.
        following: The batch after that window, if it was read.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._micro_batches: Iterator[MicroBatch] = iter(())
        self.state: dict[str, Any] | None = None
        self.following: MicroBatch | None = None

    def windows(
        self, epoch: int, position: int, done: int, until: int | None
    ) -> Generator[Window | StreamWindow, None, None]:
        """Yield the windows of the epoch, as `Feed.windows`."""
        feed, source, transfer = self._feed, self._feed.source, self._feed.transfer
        state = None
        if feed.left_early and source.stateful and not position:
            # A run that resumes here loads the state too, so both continue from the same state.
            state = source.snapshot()
            source.ranks.in_turn(lambda: source.restore(state))
        feed.left_early = True
        limit = feed.left(done)
        self._micro_batches = feed.micro_batches(epoch, position, limit, until, done, move=False)
        transfer.following = None
        if (expected := feed.take_expected()) and limit != 0:
            self._compare(expected, position)
        feed.drop(self._micro_batches)
        source.seed_epoch(epoch)
        self.state = source.snapshot() if state is None else state
        ahead = source.made_ahead and transfer.draws_ahead
        for size in feed.window_sizes():
            first = [] if self.following is None else [self.following]
            window = [*first, *islice(self._micro_batches, size - len(first))]
            if not window:
                break
            self.state, self.following = source.snapshot(), None
            made = Window(window, self._ends()) if ahead else StreamWindow(window, self._ends)
            if ahead:
                transfer.following = self.following
            yield made
            if made.last:
                break
        self.state = None

    def _ends(self) -> bool:
        """Read the next batch, and return whether there is none."""
        self.following = next(self._micro_batches, None)
        if self.following is None:
            self.state = self._feed.source.snapshot()
        return self.following is None

    def _compare(self, expected: list[Fingerprint], position: int) -> None:
        """Warn if the data does not go on where the checkpoint was saved."""
        first = next(self._micro_batches, None)
        self._micro_batches = chain([] if first is None else [first], self._micro_batches)
        found = [] if first is None or first.is_placeholder else of_samples(first.batch, first.samples)
        pairs = list(zip(expected, found, strict=False))  # the batch size may have changed
        then, now = next((each for each in pairs if not matches(*each)), (expected[0], None))
        if pairs and now is None:
            return
        _LOG.warning(
            f"the {self._feed.source.name} data comes in another order than before the resume: after"
            f" {position} batches a sample {as_text(then)} came next when the checkpoint was saved, and now"
            f" comes {'none' if now is None else as_text(now)}. Samples of this epoch are lost or come twice,"
            " unless only their augmentation differs. Its seed, batch_size, num_workers and shuffle buffer"
            " must be those of the checkpoint, or be in its state_dict(); or resume from the end of an epoch"
        )


class Feed:
    """A source's batches, counted, grouped into windows and moved to the device.

    Args:
        source: The batches.
        transfer: Moves them to the device.
        measure: Counts them.
        accumulation: The number of micro-batches per window; an `IntSchedule` if it changes.
        limit: The maximum number of micro-batches in an epoch, or the fraction of them; None for all.
        batch_sizes: The `IntSchedule` of the source's batch size; None if it does not change.
        progress: The run's progress, for what changes during it; None for a run at its start.

    Attributes:
        accumulation: The largest number of micro-batches per window.
        calendar: The windows of a fit with this data, planned from the data's length when the last epoch
            began.
        transfer: The object that moves its batches.
        left_early: Whether the last epoch was left before its data ended.

    Raises:
        ConfigError: The limit is a fraction and the data's length is unknown, or a schedule is in samples and
            the data's number of samples is unknown.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        measure: Measure | None = None,
        accumulation: int | Mapping[Any, int] = 1,
        limit: float | None = None,
        batch_sizes: IntSchedule | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.accumulation = most(accumulation)
        self.transfer = transfer
        # Whether the first tensor of a batch decides what its loss counts, which is then looked at once.
        self._checks_samples = not source.knows_samples and measure is not None and measure.weight is None
        self._measure = measure or Measure()
        self._given_limit = limit
        if limit is not None:
            _whole(limit, source)  # which may be impossible
        self._epoch: SizedEpoch | StreamEpoch | None = None  # the last one read
        self._expected: list[Fingerprint] | None = None
        self.left_early = False
        self._compare: Compare | None = None
        self._begun_at = (0, 0)
        self._waits_for: int | None = None  # a batch's number, counted from `_begun_at`
        self.skips_bad_batches = False
        self._progress = Progress() if progress is None else progress
        self._cut: Cut | None = None
        self._asked = ""  # what the resume was asked to do with the data
        self._left_out = 0
        self._length_told = False
        size = 1 if source.samples_per_epoch is None else source.batch_size or 1
        self.calendar = self._make_calendar(accumulation, batch_sizes or size)
        self.calendar.counts_tokens = self._measure.tokens is not None
        if not self.calendar.is_planned and self.calendar.batches.unit == "tokens":
            self.calendar.resolved(Every(self.calendar.batches.next_start(0) or 1, "tokens"))
        if batch_sizes is not None:
            _check_unit("batch_size", self.calendar.batch_size, self.calendar)
            source.calendar = self.calendar

    @property
    def limit(self) -> int | None:
        """The maximum number of micro-batches in an epoch; None for all."""
        return None if self._given_limit is None else _whole(self._given_limit, self.source)

    def _length_now(self) -> int | None:
        source = self.source
        return source.count() if source.samples_per_epoch is None else source.samples_per_epoch

    def skip_bad_batches(self) -> None:
        """From now on, replace a micro-batch that cannot be made with one of weight zero, on all processes.

        Raises:
            DataError: The data cannot be read any further after such a batch.
        """
        self.source.skip_bad_batches()
        self.skips_bad_batches = True

    def waiting(self) -> str | None:
        """Return which batch is waited for, and which process makes it; None if none is. Thread-safe."""
        (epoch, position), number = self._begun_at, self._waits_for
        return None if number is None else self.source.waiting(epoch, self._number(position, number, False))

    def compare_first(self, compare: Compare) -> None:
        """Call `compare` with the evidence of the first round, or with None if there is no batch."""
        self._compare, self.source.needs_evidence = compare, True

    def _make_calendar(self, batches: Mapping[Any, int] | int, batch_sizes: IntSchedule | int) -> Calendar:
        source = self.source
        return Calendar(
            self._by_samples(batches),
            self._by_samples(batch_sizes),
            length=self._length_now(),
            counts_samples=source.samples_per_epoch is not None,
            shards=source.shard.size,
            limit=self.limit,
            drop_last=source.drop_last,
            exact=source.exact,
        )

    def _by_samples(self, number: Any, cuts: bool = False) -> Any:
        """Return a schedule with points in samples, if it has them in tokens and the tokens of a sample are
        known; `cuts` if it cuts sequences.
        """
        if not isinstance(number, IntSchedule) or number.unit != "tokens":
            return number
        each = tokens_per_sample(self.source.dataset)
        if each is None:
            return number
        return number.by_samples(lambda length: min(length, each) if cuts else each)

    def cut(self, lengths: IntSchedule, cut: Cut, name: str) -> None:
        """Cut each batch by a function, before the batch is counted.

        Args:
            lengths: The lengths by points of the run.
            cut: Takes a batch and the length at its point; returns the batch to use instead.
            name: The name of the lengths, for messages.

        Raises:
            ConfigError: The points are in samples, and the data's number of samples is unknown; or another
                function cuts the batches already.
        """
        if self._cut is not None:
            raise ConfigError(f"two {name}s would cut the same batches. Give one")
        lengths = self._by_samples(lengths, cuts=True)
        _check_unit(name, lengths, self.calendar)
        self.calendar.lengths, self._cut = lengths, cut

    def window_sizes(self) -> Iterator[int]:
        """Return the micro-batches of each window from the position begun at, of data without an end."""
        if self.calendar.is_planned:
            return map(itemgetter(0), self.calendar.windows())
        return iter(partial(self.calendar.batches_now, self._progress), None)

    @property
    def samples_per_step(self) -> int | None:
        """The number of samples of a whole window over all processes, at the start of a run; None if
        unknown.
        """
        size, shard = self.source.batch_size, self.source.shard.size
        return None if size is None else size * shard * self.calendar.batches.first

    @property
    def batches_per_epoch(self) -> int | None:
        """The number of micro-batches in an epoch, of the current one if it changes; None if unknown."""
        if len(self.calendar.batch_size) > 1:
            return self.calendar.rounds_in(self._progress.epoch)
        count = self.source.count()
        if self.limit is None or count is None:
            return count
        return min(count, self.limit)

    def begin(self, epoch: int = 0, position: int = 0, done: int = 0, until: int | None = 0) -> None:
        """Let workers begin with the batches that `windows` yields with the same arguments.

        Raises:
            DataError: The sampler raised, or the workers cannot be started.
        """
        self._begin(epoch, position, self.left(done), until, done)

    def _begin(self, epoch: int, position: int, limit: int | None, until: int | None, done: int = 0) -> None:
        self.calendar.begun = self._run_position(epoch, position, done)
        if limit is None or limit > 0:
            self.source.begin(epoch, position, limit, LookAhead(until, self.limit))

    def _run_position(self, epoch: int, position: int, done: int) -> RunPosition:
        """Return the position in the run of a position in an epoch."""
        progress = self._progress
        if not self.calendar.counts_samples:  # positions of such data are its own
            left = self.source.count(position) if self.source.exact else None
            position = done if left is None else (self.source.count() or 0) - left
        return RunPosition(epoch, position, done, progress.steps + progress.skipped, progress.samples)

    def left(self, done: int) -> int | None:
        """Return how many micro-batches remain in an epoch before the limit; None without a limit."""
        return None if self.limit is None else self.limit - done + self._left_out

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
        """Return the counted micro-batches of an epoch from a position on; if `move`, on the device."""
        limit = self.limit if limit is None else limit
        self._begin(epoch, position, limit, until, done)
        counted = self._counted(epoch, position, limit)
        early = self.source.made_ahead and not self.source.stateful
        return self.transfer.ahead(counted, early) if move else counted

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
        kind = SizedEpoch if self.source.exact and self.calendar.is_planned else StreamEpoch
        self._epoch = kind(self)
        return self._epoch.windows(epoch, position, done, until)

    def note_length(self, epoch: int) -> None:
        """Log once that the data's known length has changed since the start.

        Raises:
            DataError: The sizes of the windows were planned for the old length.
        """
        now, calendar = self._length_now(), self.calendar
        if now == calendar.length:
            return
        what = (
            f"the {self.source.name} data has the length {now} in epoch {epoch} and had"
            f" {calendar.length} before"
        )
        if calendar.varies or len(calendar.lengths) > 1:
            raise DataError(
                f"{what}, and the schedule of a batch size, of gradient_accumulation_steps or of a sequence"
                " length is planned for that. Use one number instead of a schedule, or data of one length"
            )
        self.calendar = self._make_calendar(calendar.batches, calendar.batch_size)
        self.calendar.lengths, self.calendar.begun = calendar.lengths, calendar.begun
        if not self._length_told and self.source.shard.rank == 0:
            self._length_told = True
            _LOG.info(
                f"{what}. Schedules, and intervals in parts of an epoch, stay as they were planned at the"
                " start"
            )

    def snapshot(self) -> dict[str, Any]:
        """Return the data's position after the last window yielded; all processes must call it."""
        source, epoch = self.source, self._epoch
        state = None if epoch is None else epoch.state
        following, order, samples = None if epoch is None else epoch.following, source.order_state(), None
        if following is not None and not (following.is_placeholder or following.bad or order.get("order")):
            samples = of_samples(following.batch, following.samples)
        has_ended = following is not None and following.is_placeholder and not following.bad
        return {
            "data": source.gathered(source.snapshot() if state is None else state),
            "data_continues": source.gathered({**order, "next": samples, "ended": has_ended}),
            "data_ended": not self.left_early,
            "data_asked": "" if self._left_out else self._asked,
        }

    def resume(self, saved: Mapping[str, Any], how: Resumption) -> bool:
        """Continue from a checkpoint's state, or from another position if `new_data` or `skip` was given.

        All processes must call it.

        Returns:
            Whether the position was moved.

        Raises:
            CheckpointError: As for `restore`.
            ConfigError: The data to leave out cannot be counted.
        """
        progress, moves = self._progress, how.applies_to(saved)
        self._asked = how.asked
        if how.new_data and moves:
            progress.position = progress.epoch_steps = progress.epoch_batches = 0
        else:
            self.restore(saved, progress.position)
        if how.skip is not None and moves:
            self._left_out = leave_out(how.skip, self.source, self.calendar, progress)
        return moves

    def drop(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Read the micro-batches that a resume leaves out, and move the run's position past them, once."""
        rounds, self._left_out = self._left_out, 0
        for number in range(rounds):
            dropped = next(micro_batches, None)
            if dropped is None:
                raise DataError(
                    f"the {self.source.name} data has ended after {number} of the {rounds} batches of each"
                    " process that were to be skipped. Data of unknown length is skipped within an epoch"
                )
            self._progress.position += dropped.advance

    def restore(self, saved: Mapping[str, Any], position: int) -> None:
        """Restore the result of `snapshot`; all processes must call it.

        The next samples are then compared with those that came next at the save: on each process if it reads
        its own data, and on the first process if all read the same data.

        Args:
            saved: The result of `snapshot`; other entries are ignored.
            position: The run's position in its epoch.

        Raises:
            CheckpointError: The state is of data that was divided differently, or had another length.
        """
        source, state = self.source, saved["data"]
        if not is_divided_alike(source, state, position, saved.get("data_ended", False)):
            return
        before = source.own_part(saved.get("data_continues"))
        if before is not None:
            source.restore_order(before, position)
            is_own = source.is_split or source.shard.rank == 0
            self._expected = before["next"] if position and is_own else None
            source.part_has_ended = bool(position and before.get("ended"))
        if source.stateful and state is not None:
            # One at a time: some packages keep the state in memory that a machine's ranks share.
            source.ranks.in_turn(lambda: source.restore(source.own_part(state)))

    def take_expected(self) -> list[Fingerprint] | None:
        """Return the samples that must come next after a resume, once."""
        expected, self._expected = self._expected, None
        return expected

    def _counted(self, epoch: int, position: int, limit: int | None) -> Iterator[MicroBatch]:
        """Yield the counted micro-batches of this process."""
        if limit is not None and limit <= 0:
            return
        number, checked = 0, -1
        counted: MicroBatch | None = None
        is_plain, lengths = self._is_plain(), self.calendar.sequence_lengths()
        self._begun_at, self._waits_for = (epoch, position), 0
        try:
            for batch, advance, samples, *of_round in self._fetched(epoch, position):
                self._waits_for = None
                if is_plain and (samples is not None or (samples := batch_size(batch)) is not None):
                    counted = MicroBatch(batch, samples, samples, 0, advance)
                else:
                    batch = batch if self._cut is None else self._cut(batch, next(lengths))
                    counted = count_batch(
                        SharedBatch(batch, advance, samples, *(of_round or (False, None))),
                        self._measure,
                        self.skips_bad_batches,
                        partial(self._batch_name, number, bool(of_round and of_round[0])),
                    )
                if self._checks_samples and counted.samples != checked:
                    checked = counted.samples
                    self._check_samples(counted)
                number += 1
                yield counted
                if number == limit:
                    return
                self._waits_for = number
        finally:
            self._waits_for = None
            # Batches of one size may all agree with a table that has as many rows, except for the last one.
            self._check_samples(counted)
        self.left_early = False
        if number == 0 and position == 0:
            raise self._empty(epoch)

    def _is_plain(self) -> bool:
        """Return whether a batch counts its samples and nothing else."""
        is_counted = self._measure.weight is not None or self._measure.tokens is not None
        return not (is_counted or self._cut or self.skips_bad_batches or self.source.shard.size > 1)

    def _fetched(self, epoch: int, position: int) -> Iterator[Any]:
        fetched: Iterator[Any] = self.source.batches(epoch, position)
        if self._compare is None or self.source.shard.size == 1:
            return fetched
        compare, self._compare = self._compare, None
        first = next(fetched, None)
        compare(None if first is None else first.evidence)
        return fetched if first is None else chain((first,), fetched)

    def _check_samples(self, micro: MicroBatch | None) -> None:
        """Warn once if the tensors of a batch disagree about its number of samples.

        Looked at are an epoch's first batch, its last, and each that has another number than the one before.
        """
        if not self._checks_samples or micro is None or micro.batch is None:
            return
        found = first_dimensions(micro.batch)
        if not found:
            return
        self._checks_samples = False
        if self.source.shard.rank == 0:
            listed = ", ".join(f"{name}: {size}" for name, size in list(found.items())[:8])
            _LOG.warning(
                f"the tensors of a batch of the {self.source.name} data differ in their first dimension"
                f" ({listed}). The batch counts as {batch_size(micro.batch)} samples, by the first tensor,"
                " and its loss has that weight. To give another weight, define loss_weight(batch) in the"
                " task. If each item of a list is a single sample, pass DataLoader(data, batch_size=32)"
            )

    def _number(self, position: int, round_: int, is_placeholder: bool) -> int:
        """Return the number in its epoch of this process's batch in a round after a position."""
        if self.source.is_split:
            return position + round_
        shard = self.source.shard
        return self.source.number(position) + round_ * shard.size + (0 if is_placeholder else shard.rank)

    def _batch_name(self, number: int, is_placeholder: bool) -> str:
        epoch, position = self._begun_at
        where = self._number(position, number, is_placeholder)
        return f"batch {where} of epoch {epoch} of the {self.source.name} data"

    def _empty(self, epoch: int) -> DataError:
        return DataError(
            f"the {self.source.name} data is empty: it gave no batch in epoch {epoch}. Possible reasons are a"
            " dataset smaller than its batch size with drop_last=True, and an iterator that was used up"
            " before"
        )


def _check_unit(name: str, schedule: IntSchedule, calendar: Calendar) -> None:
    """Check that it is known beforehand which batches come before each point of a schedule."""
    if not calendar.is_planned:
        raise ConfigError(
            f"{name}={schedule!r} needs steps that are known beforehand. With this data those of"
            f" gradient_accumulation_steps={calendar.batches!r} follow the {calendar.batches.unit} that are"
            " read. Give one number of gradient_accumulation_steps, or points in steps or epochs"
        )
    if schedule.unit == "tokens" or (schedule.unit == "samples" and not calendar.counts_samples):
        raise ConfigError(
            f"{name}={schedule!r} changes after {schedule.unit}. The training data must then be a dataset"
            " with a length, read without a batch sampler of your own. For points in tokens its samples must"
            " have equally many: rows of drivetrain.data.packed, or data with an attribute tokens_per_sample."
            " Or give the points in steps or epochs"
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
