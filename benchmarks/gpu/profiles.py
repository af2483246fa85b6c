"""What the GPU does in some steps, from the trace of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from workloads import Clock

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class ProfilingClock(Clock):
    """Runs the profiler from one loss to another.

    Args:
        first: Losses before the first that is profiled.
        count: Losses that are.
        device: "cpu" or "cuda".
        wait: Waits for the device.
    """

    def __init__(self, first: int, count: int, device: str, wait: Callable[[], None]) -> None:
        super().__init__()
        self.first = first
        self.last = first + count
        self.wait = wait
        # On a GPU without what the CPU does, for noting that takes longer than many a kernel.
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        self.profiler = profile(activities=[activity])
        self.running = False

    def __call__(self) -> None:
        """Note the time, and begin or end."""
        number = len(self.times)
        if number == self.first:
            self.wait()
            self.profiler.start()
            self.running = True
        elif number == self.last:
            self.stop()
        super().__call__()

    def stop(self) -> None:
        """End, if it has begun."""
        if self.running:
            self.running = False
            self.profiler.stop()

    def trace(self, directory: Path) -> list[dict[str, Any]]:
        """Return the events of Chrome's format."""
        path = directory / "trace.json"
        self.profiler.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return found


def summary(events: list[dict[str, Any]], steps: int) -> dict[str, float | None]:
    """Return what a trace says about a step.

    Args:
        events: Of Chrome's format; times are microseconds.
        steps: How many the trace has.

    Returns:
        "kernels", "waits" (the host's for the device) and "pageable" (copies from or to memory that is not
        pinned) of a step, and "idle", the share of the time from the first kernel to the last in which the
        device did nothing; None without a device.
    """
    spans = [(e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("cat") in _ON_DEVICE]
    waits = sum(e.get("cat") == "cuda_runtime" and e.get("name") in _WAITS for e in events)
    pageable = sum(e.get("cat") == "gpu_memcpy" and "Pageable" in e.get("name", "") for e in events)
    kernels = sum(e.get("cat") == "kernel" for e in events)
    idle = None
    if spans:
        busy, reached = 0.0, float("-inf")
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        whole = reached - min(start for start, _ in spans)
        idle = 1 - busy / whole if whole else 0.0
    counts = {"kernels": kernels, "waits": waits, "pageable": pageable}
    return {**{name: count / steps for name, count in counts.items()}, "idle": idle}
