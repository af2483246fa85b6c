"""A run's speed, and the shares of its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callbacks.base import Callback, check_only_one
from drivetrain.callbacks.statistics.flops import FlopCount
from drivetrain.callbacks.statistics.peaks import peak_flops
from drivetrain.core.messages import logger
from drivetrain.core.validation import by_name, flag, number
from drivetrain.data.batch import batch_size

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

_UNCOUNTED = (
    "The floating-point operations of this task cannot be counted ({}: {}), so Throughput logs none. "
    "Throughput(flops_per_sample=) gives their number; Throughput(measure_flops=False) counts none."
)

_PARTS = ("data", "compute", "evaluation", "save", "compile")


@by_name
class Throughput(Callback):
    """Adds speeds to each log point, measured since the log point before.

    All names begin with ``throughput/``:

    - ``samples_per_second``, ``tokens_per_second`` (if tokens are counted) and ``steps_per_second``: over
      the training time, which is the wall time without evaluation, saving and compiling;
    - ``data_seconds``, ``compute_seconds``, ``evaluation_seconds`` and ``save_seconds``: the parts of the
      wall time. ``Trainer(compile=True)`` adds ``compile_seconds``. Each also has its share of the wall time,
      such as ``data_share``. "data" is the time that the host waits for data, while a GPU keeps working.
      "compute" is the host's time too;
    - ``model_flops_per_second``: operations of the forward and backward passes, on all devices, without those
      that activation checkpointing computes again;
    - ``model_flops``: all such operations since the run began, including those before a resume;
    - ``model_flops_utilisation`` (MFU): the operations per second of one device over its peak, if the peak is
      known (Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B);

    The first step of a fit is left out, because it warms up caches and allocators. A log point gets no values
    if no step was made since the previous log point, as in an evaluation. Nothing here waits for the device.

    The operations are counted while torch runs the fit's first step (`torch.utils.flop_counter`). Attention
    counts in full even if it is causal. Later steps are assumed to have as many operations for each token as
    the first step, or for each sample if no tokens are counted. The higher cost of attention in longer
    sequences is therefore not counted. A compiled task runs the first step uncompiled. A checkpoint stores
    the count, so that a resumed run does not count again.

    Args:
        peak_flops: The peak of one device in FLOP/s. By default the GPU's peak in the precision's compute
            dtype, from a table (`drivetrain.callbacks.statistics.peaks`).
        flops_per_sample: Floating-point operations per sample of a forward and backward pass.
        measure_flops: Whether to count them when they are not given.

    Raises:
        ConfigError: A peak or a number of operations is not positive. The Trainer raises it for two
            Throughputs, which would log under the same names.
    """

    timed_names: ClassVar[Sequence[str]] = ("throughput/*",)

    def __init__(
        self,
        peak_flops: float | None = None,
        flops_per_sample: float | None = None,
        measure_flops: bool = True,
    ) -> None:
        for name, value in {"peak_flops": peak_flops, "flops_per_sample": flops_per_sample}.items():
            if value is not None:
                number(f"Throughput's {name}", value, above=0)
        self.peak_flops = peak_flops
        self.flops_per_sample = flops_per_sample
        self.measure_flops = flag("Throughput(measure_flops=)", measure_flops)
        self._counted: float | None = None  # the operations of a sample of the first step
        self._tokens = 0.0  # and its tokens
        self._peak = peak_flops
        self._devices = 1
        self._measure = False
        self._loaded = False
        self._counting: FlopCount | None = None
        self._mark: _LogMark | None = None

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that there is only one: two would log under the same names and disturb each other's count.

        Raises:
            ConfigError: There are more.
        """
        check_only_one(Throughput, trainer, "log under the same names. Give one, with all of the options")

    def on_fit_start(self, run: Run) -> None:
        """Look up the device's peak and reset the measurement."""
        if not self._loaded:
            self._counted = self.flops_per_sample
            self._tokens = 0.0
        self._loaded = False
        self._measure = self.measure_flops and self.flops_per_sample is None
        self._peak = self.peak_flops or _device_peak(run)
        self._devices = run.engine.strategy.world_size
        self._mark = None

    def on_step_start(self, run: Run) -> None:
        """Count the operations of the first step."""
        if self._measure and self._counted is None:
            self._counting = FlopCount()
            if run.engine.splitter is not None:  # an attempt that ran out of memory does not count
                run.engine.splitter.begun_again.append(self._counting.forget)

    def on_before_optimizer_step(self, run: Run) -> None:
        """Finish the count after forward and backward; with several optimizers, at each one's step."""
        if self._counting is not None:
            self._counting.read()

    def on_step_end(self, run: Run) -> None:
        """Start the first measurement after the first step."""
        if self._counting is not None:
            self._finish_counting(run)
        elif self._mark is None:
            self._mark = _LogMark.now(run, self._done(run))

    def on_log(self, run: Run) -> None:
        """Log the measurements since the previous log point."""
        before = self._mark
        if before is None or run.progress.steps == before.steps:
            return
        now = self._mark = _LogMark.now(run, self._done(run))
        wall = now.seconds - before.seconds
        spent = {
            part: now.timing[part] - before.timing.get(part, 0.0) for part in _PARTS if part in now.timing
        }
        training = wall - spent["evaluation"] - spent["save"] - spent.get("compile", 0.0)
        if training <= 0:
            return
        samples = (now.samples - before.samples) / training
        run.log("throughput/samples_per_second", samples)
        if now.tokens > before.tokens:
            run.log("throughput/tokens_per_second", (now.tokens - before.tokens) / training)
        run.log("throughput/steps_per_second", (now.steps - before.steps) / training)
        for part, seconds in spent.items():
            run.log(f"throughput/{part}_seconds", seconds)
            run.log(f"throughput/{part}_share", seconds / wall)
        if now.flops:
            flops = (now.flops - before.flops) / training
            run.log("throughput/model_flops_per_second", flops)
            run.log("throughput/model_flops", now.flops)
            if self._peak is not None:
                run.log("throughput/model_flops_utilisation", flops / self._devices / self._peak)

    def state_dict(self) -> dict[str, Any]:
        """Return the operations and the tokens per sample in the first step."""
        return {"flops": self._counted, "tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a number given to the constructor takes precedence."""
        if self.flops_per_sample is None:
            self._counted = None if state["flops"] is None else float(state["flops"])
            self._tokens = float(state["tokens"])
            self._loaded = True

    def _finish_counting(self, run: Run) -> None:
        assert self._counting is not None
        found, failed = self._counting.read_at, self._counting.failed
        self._stop(run)
        if failed is not None:
            self._measure = False
            if run.is_main:
                _LOG.warning(_UNCOUNTED.format(type(failed).__name__, failed))
            return
        samples = sum(batch_size(each.batch) or 0 for each in run.window.micro_batches)
        # A window of weight zero makes no step, and has no complete backward to count.
        if found is not None and samples and run.progress.samples:
            # Matrices that are sharded over ranks are counted whole; attention over a part of the heads is
            # not.
            self._counted = found * run.engine.strategy.part[1] / samples
            self._tokens = run.progress.tokens / run.progress.samples

    def _done(self, run: Run) -> float:
        """Return the operations since the run began, on all devices."""
        if self._counted is None:
            return 0.0
        progress = run.progress
        samples = progress.tokens / self._tokens if self._tokens else progress.samples
        return samples * self._counted

    def _stop(self, run: Run) -> None:
        if self._counting is not None:
            if run.engine.splitter is not None:
                run.engine.splitter.begun_again.remove(self._counting.forget)
            self._counting.close()
            self._counting = None
        self._loaded = False

    on_fit_end = on_exception = _stop


@dataclass(frozen=True, slots=True)
class _LogMark:
    """A point in the run."""

    seconds: float
    steps: int
    samples: int
    tokens: int
    timing: dict[str, float]
    flops: float

    @classmethod
    def now(cls, run: Run, flops: float) -> _LogMark:
        progress, timing = run.progress, dict(run.timing)
        return cls(time.perf_counter(), progress.steps, progress.samples, progress.tokens, timing, flops)


def _device_peak(run: Run) -> float | None:
    device = run.engine.device
    if device.type != "cuda":
        return None
    precision = run.engine.precision
    stored = next((each.dtype for each in run.task.parameters() if each.is_floating_point()), torch.float32)
    dtype = precision.compute_dtype or precision.param_dtype or stored
    # torch's other query, get_float32_matmul_precision, is an error once this was set.
    matmul: Any = torch.backends.cuda.matmul
    tf32 = matmul.fp32_precision == "tf32"
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32)
