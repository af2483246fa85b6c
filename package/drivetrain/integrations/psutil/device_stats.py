"""The use of the GPU, the processor, memory, disk and network."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.core.errors import MissingDependencyError
from drivetrain.core.intervals import steps_or_epochs
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import by_name, one_of

if TYPE_CHECKING:
    from drivetrain.core.intervals import Interval
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

OVER_RANKS = ("mean", "max", "each")
"""The values of `DeviceStats(over_ranks=)`."""

_ALLOCATOR = {
    "cuda_allocated_bytes": "allocated_bytes.all.current",
    "cuda_reserved_bytes": "reserved_bytes.all.current",
    "cuda_peak_allocated_bytes": "allocated_bytes.all.peak",
    "cuda_allocation_retries": "num_alloc_retries",
}
"""Our names of values of `torch.cuda.memory_stats`."""


@by_name
class DeviceStats(Callback):
    """Logs the use of the machine at log points, read from NVML, torch's allocator and psutil.

    All names begin with ``device/``:

    - ``cpu_percent`` (of all cores together), ``memory_percent``, ``swap_percent``, ``process_cpu_percent``
      (more than 100 with several busy threads) and ``process_memory_bytes``, without the data's workers;
    - ``disk_free_bytes`` where the run writes, ``disk_read_bytes_per_second``,
      ``disk_written_bytes_per_second``, ``network_sent_bytes_per_second`` and
      ``network_received_bytes_per_second``: those of the whole machine;
    - on a GPU, by NVML, ``gpu_utilisation_percent``, ``gpu_memory_used_bytes`` (of all programs),
      ``gpu_memory_percent``, ``gpu_temperature_celsius`` and ``gpu_power_watts``;
    - on a GPU, by torch's allocator, ``cuda_allocated_bytes``, ``cuda_reserved_bytes``,
      ``cuda_peak_allocated_bytes`` and ``cuda_allocation_retries``, the last two since the process began.

    Percentages of processors and rates cover the time since the last values; the other values are those of
    the moment. Values that the machine does not provide are left out, and named once.

    Args:
        every: The least interval between two log points with values, in steps or whole epochs; None takes
            every log point.
        over_ranks: "mean" or "max" over all ranks; or "each", with names such as "device/rank0/cpu_percent".

    Raises:
        ConfigError: An argument that is not allowed.
        MissingDependencyError: When a Trainer is made: psutil, or on an NVIDIA GPU nvidia-ml-py, is not
            installed.
    """

    timed_names: ClassVar[Sequence[str]] = ("device/*",)

    def __init__(self, *, every: Interval | None = None, over_ranks: str = "mean") -> None:
        self.over_ranks = one_of("over_ranks of DeviceStats", over_ranks, OVER_RANKS)
        self.every = None if every is None else steps_or_epochs("DeviceStats(every=)", every)
        self._steps = self._epochs = 0  # of the last log point with values
        self._readings: dict[str, Callable[[], float | None]] = {}

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the packages that read the values are installed.

        Raises:
            MissingDependencyError: One is not.
        """
        if not is_installed("psutil"):
            raise MissingDependencyError("psutil", "stats", "DeviceStats")
        # For AMD's GPUs torch asks another library.
        if strategy.device.type == "cuda" and torch.version.hip is None and not is_installed("pynvml"):
            raise MissingDependencyError("nvidia-ml-py", "stats", "DeviceStats on an NVIDIA GPU")

    def on_fit_start(self, run: Run) -> None:
        """Begin to measure."""
        if self._steps > run.progress.steps:  # those of another fit
            self._steps = self._epochs = 0
        device = run.engine.device
        self._readings = {**_of_host(run), **_of_gpu(device)}
        lacking = [name for name in self._readings if self._read(name) is None]
        for name in lacking:
            del self._readings[name]
        if run.is_main and device.type != "cuda":
            _LOG.info(f"DeviceStats: the device is {device.type!r}, and no values of a GPU are logged")
        if run.is_main and lacking:
            _LOG.info(f"DeviceStats: this machine does not report {', '.join(lacking)}")

    def on_log(self, run: Run) -> None:
        """Log the values."""
        if not self._is_due(run):
            return
        self._steps, self._epochs = run.progress.steps, run.progress.epoch
        read = {name: self._read(name) for name in self._readings}
        mine = {name: each for name, each in read.items() if each is not None}
        of_all = run.engine.ranks.gather_first(mine)
        if of_all is None:
            return
        if self.over_ranks == "each":
            for rank, values in enumerate(of_all):
                for name, value in values.items():
                    run.log(f"device/rank{rank}/{name}", value)
            return
        for name in dict.fromkeys(name for values in of_all for name in values):
            found = [values[name] for values in of_all if name in values]
            run.log(f"device/{name}", max(found) if self.over_ranks == "max" else sum(found) / len(found))

    def _is_due(self, run: Run) -> bool:
        """Return whether this log point is the first at or after an end of the interval."""
        steps, epochs = run.progress.steps, run.progress.epoch
        if self.every is None:
            return steps > self._steps
        before, now = (self._steps, steps) if self.every.unit == "steps" else (self._epochs, epochs)
        return now // int(self.every.amount) > before // int(self.every.amount)

    def state_dict(self) -> dict[str, Any]:
        """Return the last log point with values."""
        return {"steps": self._steps, "epochs": self._epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._steps, self._epochs = int(state["steps"]), int(state["epochs"])

    def _read(self, name: str) -> float | None:
        try:
            return self._readings[name]()
        except Exception as error:  # of drivers and systems, each with its own; no reason to end a run
            _LOG.debug(f"DeviceStats: {name}: {error}")
            return None


def _of_host(run: Run) -> dict[str, Callable[[], float | None]]:
    """Return functions that read the machine's values."""
    import psutil

    process = psutil.Process()
    directory = next((each for each in _with_parents(run) if each.exists()), Path.cwd())
    return {
        "cpu_percent": psutil.cpu_percent,
        "memory_percent": lambda: psutil.virtual_memory().percent,
        "swap_percent": lambda: psutil.swap_memory().percent,
        "process_cpu_percent": process.cpu_percent,
        "process_memory_bytes": lambda: process.memory_info().rss,
        "disk_free_bytes": lambda: psutil.disk_usage(str(directory)).free,
        "disk_read_bytes_per_second": _CounterRate(lambda: psutil.disk_io_counters().read_bytes),
        "disk_written_bytes_per_second": _CounterRate(lambda: psutil.disk_io_counters().write_bytes),
        "network_sent_bytes_per_second": _CounterRate(lambda: psutil.net_io_counters().bytes_sent),
        "network_received_bytes_per_second": _CounterRate(lambda: psutil.net_io_counters().bytes_recv),
    }


def _with_parents(run: Run) -> list[Path]:
    return [] if run.run_dir is None else [run.run_dir, *run.run_dir.parents]


def _of_gpu(device: torch.device) -> dict[str, Callable[[], float | None]]:
    """Return functions that read a GPU's values: torch finds the GPU for NVML, whatever GPUs are visible."""
    if device.type != "cuda":
        return {}
    whole = torch.cuda.get_device_properties(device).total_memory

    def of_allocator(theirs: str) -> Callable[[], float | None]:
        return lambda: torch.cuda.memory_stats(device).get(theirs)

    return {
        "gpu_utilisation_percent": lambda: torch.cuda.utilization(device),
        "gpu_memory_used_bytes": lambda: torch.cuda.device_memory_used(device),
        "gpu_memory_percent": lambda: 100 * torch.cuda.device_memory_used(device) / whole,
        "gpu_temperature_celsius": lambda: torch.cuda.temperature(device),
        "gpu_power_watts": lambda: torch.cuda.power_draw(device) / 1000,
        **{ours: of_allocator(theirs) for ours, theirs in _ALLOCATOR.items()},
    }


class _CounterRate:
    """The growth of a counter per second since the last call; 0 in the first one."""

    def __init__(self, counter: Callable[[], float]) -> None:
        self._counter = counter
        self._before: tuple[float, float] | None = None

    def __call__(self) -> float:
        now = time.perf_counter(), self._counter()
        before, self._before = self._before or now, now
        seconds = now[0] - before[0]
        return (now[1] - before[1]) / seconds if seconds > 0 else 0.0
