"""The largest batch whose step fits into memory, by real steps on a copy of the task."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.callbacks.memory_report import MemoryReport
from drivetrain.core.errors import ConfigError
from drivetrain.core.int_schedule import at_start, most
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import clear_frames, free_caches, is_out_of_memory
from drivetrain.core.validation import byte_count, count
from drivetrain.run.settings import known_accumulation
from drivetrain.task.task import TaskModule
from drivetrain.trainer.data_objects import pick_data
from drivetrain.trainer.probe import Fit, Settings, probe

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

_FEWEST = 2
"""The samples to begin with if the Trainer has no batch size: a batch norm cannot train on one."""


@dataclass(frozen=True)
class BatchSizeResult:
    """The result of `Trainer.find_batch_size`.

    Attributes:
        batch_size: The largest batch that fits.
        limit: The bytes that a step may take; None for as many as the device has.
        peaks: The bytes at the peak of a step, by batch size; None where memory ran out.
    """

    batch_size: int
    limit: int | None
    peaks: dict[int, int | None] = field(default_factory=dict)


class _RepeatedSamples(Dataset[Any]):
    """The samples of a dataset again and again, so that each step has a whole batch."""

    def __init__(self, data: Any, length: int) -> None:
        self._data, self._length = data, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._data[index % len(self._data)]


class _PeakOfAll(MemoryReport):
    """The report of memory, with the largest peak of all ranks."""

    peak: int | None = None

    def on_fit_end(self, run: Run) -> None:
        self.peak = max(run.engine.ranks.all_gather(0 if self.use is None else self.use.measured)) or None


def find_batch_size(
    settings: Settings,
    task: TaskModule,
    data: Any,
    fit: Fit[Settings],
    memory: int | str | None,
    largest: int | None,
) -> BatchSizeResult:
    """Find the size; see `Trainer.find_batch_size`."""
    data = pick_data(data, "training")
    if isinstance(data, (DataLoader, IterableDataset)) or not _is_indexed(data):
        raise ConfigError(
            f"find_batch_size makes batches of several sizes, and the data is a {type(data).__name__}. Give a"
            " dataset with a length and an index"
        )
    if settings.micro_batch is not None:
        raise ConfigError(
            f"find_batch_size with micro_batch={settings.micro_batch!r}, which splits a batch of any size."
            " Leave it out"
        )
    limit = _limit(memory, settings.select_strategy())
    upper = count("find_batch_size(largest=)", len(data) if largest is None else largest, at_least=1)
    peaks: dict[int, int | None] = {}

    def fits(size: int) -> bool:
        peaks[size] = _peak(settings, task, data, fit, size)
        found = peaks[size]
        shown = "out of memory" if found is None else f"{found / 2**20:,.1f} MiB"
        if settings.progress_bar:
            _LOG.info(f"a step of {size} samples: {shown}")
        return found is not None and (limit is None or found <= limit)

    below, above = 0, upper + 1  # the largest that fits, and the smallest that does not
    size = min(upper, at_start(settings.batch_size) or _FEWEST)
    while above - below > 1:
        if fits(size):
            below = size
        else:
            above = size
        size = min(2 * below, upper) if above > upper else (below + above) // 2
    if not below:
        raise ConfigError(
            f"not even one sample fits: a step of it takes {peaks[1] or 'more than all'} bytes, and the limit"
            f" is {limit or 'the memory of the device'}. Save memory with MemoryConfig(...), or use a smaller"
            " model"
        )
    return BatchSizeResult(below, limit, dict(sorted(peaks.items())))


def _limit(memory: int | str | None, strategy: Strategy) -> int | None:
    """Return the most bytes of a step; None where the memory of the device ends."""
    if memory is not None:
        return byte_count("find_batch_size(memory=)", memory)
    if strategy.device.type == "cpu" or strategy.world_size > 1:
        where = "a CPU, which swaps" if strategy.device.type == "cpu" else "several processes, which all end"
        raise ConfigError(f"find_batch_size on {where} when memory runs out: give a limit: memory='4 GiB'")
    return None


def _is_indexed(data: Any) -> bool:
    return (
        isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, (list, tuple, dict))
    )


def _peak(settings: Settings, task: TaskModule, data: Any, fit: Fit[Settings], size: int) -> int | None:
    """Return the bytes at the peak of the second step with batches of a size; None if memory runs out."""
    report = _PeakOfAll(show=False)
    strategy = settings.select_strategy()
    steps = known_accumulation(settings)
    each = size * most(steps) * strategy.world_size
    options = {
        "gradient_accumulation_steps": steps,
        "max_steps": 2,
        "callbacks": (report,),
        "batch_size": size,
        "log_every": None,
    }
    try:
        probe(settings, task, _RepeatedSamples(data, 2 * each), fit, **options)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        clear_frames(error)
        free_caches()
        return None
    if strategy.device.type != "cpu":  # there garbage of this step would count in the next one
        free_caches()
    if report.peak is None:
        raise ConfigError(
            "find_batch_size: the second step was skipped, so its memory is unknown. Use another"
            " precision than '16-mixed', or a smaller loss"
        )
    return report.peak
