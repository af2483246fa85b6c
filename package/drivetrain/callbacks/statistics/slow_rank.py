"""The rank that the others wait for."""

from __future__ import annotations

import socket
import statistics
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, number

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from drivetrain.run.run import Run

_LOG = logger(__name__)

_OWN = ("slow_rank/between_seconds", "slow_rank/forward_seconds")
_SHARE = 0.05  # of a step: a rank that costs the others less is never named


@by_name
class SlowRank(Callback):
    """Finds the rank that the others wait for, and names it with its host.

    The ranks make each step together, so its wall time is the same on all. Only the time before they meet in
    the backward differs. Each rank measures its two parts: the time between two steps, for the data, the
    callbacks and the body of `trainer.steps`; and the forward with the loss. Each log point gets, as means of
    a step since the previous one:

    - ``slow_rank/seconds``: the most seconds of a rank for both;
    - ``slow_rank/ratio``: these over the median of the ranks;
    - ``slow_rank/rank``: the rank;
    - ``slow_rank/between_seconds``, ``slow_rank/forward_seconds``: rank 0's part of each.

    The values travel in the exchange that a log point has anyway. If a rank's ratio is too high at several
    log points in a row, and the rank costs the others at least a twentieth of a step, one warning names it.

    Neither the first step counts, which may compile, nor what comes between two steps up to the end of a log
    point, an evaluation or a save, where the ranks meet too. With "fsdp", ``tensor_parallel`` and DeepSpeed's
    stage 3 the ranks meet in the forward, so only what comes between the steps stands out. So it is with
    ``micro_batch`` and in a training step that is a generator, whose forward is not measured. A layer whose
    forward exchanges values, such as ``SyncBatchNorm``, hides the slow rank. With one process nothing is
    logged.

    Args:
        ratio: The ratio that is too high.
        log_points: How many log points in a row a rank must be over it to be named.

    Raises:
        ConfigError: The ratio is not above 1, or there is not at least one log point.
    """

    timed_names: ClassVar[Sequence[str]] = ("slow_rank/*",)

    def __init__(self, ratio: float = 1.5, log_points: int = 5) -> None:
        self.ratio = number("SlowRank's ratio", ratio, above=1)
        self.log_points = number("SlowRank's log_points", log_points, at_least=1)
        self._handles: list[RemovableHandle] = []
        self._hosts: list[str] = []
        self._spans: deque[tuple[int, Any, Any]] = deque()

    def on_fit_start(self, run: Run) -> None:
        """Learn the ranks' hosts, and begin to measure."""
        self._hosts = run.engine.ranks.all_gather(socket.gethostname())
        self._slow, self._in_a_row, self._is_named = -1, 0, False
        self._met: Any = None
        self._reset(run)
        if len(self._hosts) > 1:
            module, self._on_gpu = run.engine.step_module, run.engine.device.type == "cuda"

            def begin(*_: Any) -> None:
                self._begun = _now(self._on_gpu)

            def end(*_: Any) -> None:
                if run.task.training and self._met is not None:
                    self._spans.append((1, self._begun, _now(self._on_gpu)))

            self._handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def on_step_start(self, run: Run) -> None:
        """Measure what came between the steps."""
        if self._handles and self._met is not None:
            self._spans.append((0, self._met, _now(self._on_gpu)))

    def on_step_end(self, run: Run) -> None:
        """Leave this rank's seconds for the next log point."""
        if not self._handles:
            return
        if self._met is None:  # the first step
            self._reset(run)
        else:
            self._steps += 1
            while self._spans and _has_passed(self._spans[0][2]):
                part, *both = self._spans.popleft()
                self._seconds[part] += _between(*both)
            for name, seconds in zip(_OWN, self._seconds, strict=True):
                run.log(name, seconds / self._steps)
        self._met = _now(self._on_gpu)

    on_step_end.__comes_first__ = True  # type: ignore[attr-defined]  # the other callbacks are measured

    def on_log(self, run: Run) -> None:
        """Compare the ranks."""
        self._meet(run)
        if not self._steps or not all(_OWN[0] in each for each in run.logged_by_rank or [{}]):
            return
        step = (_spent(run) - self._before) / self._steps
        self._reset(run)
        own = [tuple(each[name] for name in _OWN) for each in run.logged_by_rank]
        seconds = _seconds(own, run.engine.strategy.sharded)
        rank, median = max(range(len(own)), key=lambda each: seconds[each]), statistics.median_low(seconds)
        ratio = seconds[rank] / max(median, 1e-9)
        for name, value in {"seconds": seconds[rank], "ratio": ratio, "rank": rank}.items():
            run.log(f"slow_rank/{name}", value)
        slow = rank if ratio > self.ratio and seconds[rank] - median > _SHARE * step else -1
        self._in_a_row = self._in_a_row + 1 if slow == self._slow else 1
        self._slow = slow
        if slow >= 0 and self._in_a_row >= self.log_points and not self._is_named:
            self._is_named = True
            if run.is_main:
                between, forward = own[rank]
                _LOG.warning(
                    f"rank {rank} on {self._hosts[rank]} is slow: at {self.log_points:g} log points in a row"
                    f" it took over {self.ratio:g} times the median of the ranks, which wait for it. It takes"
                    f" {between:.2g} s between two steps, for data and callbacks, and {forward:.2g} s for the"
                    f" forward; the median rank {median:.2g} s for both"
                )

    def _reset(self, run: Run) -> None:
        self._steps, self._seconds = 0, [0.0, 0.0]
        self._before = _spent(run)

    def _meet(self, run: Run) -> None:
        if self._handles and self._met is not None:
            self._met = _now(self._on_gpu)

    on_checkpoint_saved = _meet

    def _stop(self, run: Run) -> None:
        for each in self._handles:
            each.remove()
        self._handles = []

    on_fit_end = on_exception = _stop


def _spent(run: Run) -> float:
    return run.timing["data"] + run.timing["compute"]


def _seconds(own: Sequence[tuple[float, ...]], meet_in_forward: bool) -> list[float]:
    """Return the seconds that each rank needs; where ranks wait in the forward, the shortest has no wait."""
    least = min(forward for _, forward in own)
    return [between + (least if meet_in_forward else forward) for between, forward in own]


def _now(on_gpu: bool) -> Any:
    """Return the time, on a GPU as an event of its stream, which waits for nothing."""
    if not on_gpu:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _has_passed(time: Any) -> bool:
    return isinstance(time, float) or bool(time.query())


def _between(begin: Any, end: Any) -> float:
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1000
