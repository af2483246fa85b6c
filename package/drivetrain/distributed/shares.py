"""How a rank's time of training divides into its own work and waiting for the others."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch

from drivetrain.distributed.failure_wire import is_collective

_PERIOD = 0.05
"""Seconds between two looks. One takes some 10 us, so that they cost 0.02 % of a core."""

_LOOP = os.path.join(Path(__file__).parents[1], "loop.py")


class Shares:
    """Looks at the thread that has made it 20 times a second, from a thread of its own.

    Whatever ranks do together takes all of them equally long by the clock: the slow one works while the
    others wait for it. So each look counts the time since the last one as waiting where the thread sleeps in
    a collective, or in a backward that averages gradients, and as its own work anywhere else: computing,
    reading data, sleeping. Only training counts, not evaluation, logging or saving, of which rank 0 has more
    than the others. The step pays nothing, no device is waited for, and nothing is exchanged.

    It can be told on Linux, where a collective is waited for by the thread that asks for it, as with gloo.

    Attributes:
        own: Seconds of its own work so far.
        waited: Seconds of waiting so far.
    """

    def __init__(self) -> None:
        self.own = self.waited = 0.0
        self._thread = threading.get_ident()
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._done = threading.Event()
        self._looking = threading.Thread(target=self._look, name="drivetrain-shares", daemon=True)

    @staticmethod
    def can_tell() -> bool:
        """Whether it can be told here."""
        return sys.platform == "linux" and _only_gloo()

    def start(self) -> None:
        """Begin."""
        self._looking.start()

    def stop(self) -> None:
        """End."""
        self._done.set()
        self._looking.join()

    def _look(self) -> None:
        before = time.monotonic()
        with open(self._stat, "rb", buffering=0) as stat:
            while not self._done.wait(_PERIOD):
                frame = sys._current_frames().get(self._thread)
                stat.seek(0)
                sleeps = stat.read(512).rpartition(b") ")[2][:1] == b"S"
                now = time.monotonic()
                passed, before = now - before, now
                if frame is None or not _in_training(frame):
                    continue
                # What was held up was so by work of this process: a call that holds the interpreter.
                waited = min(passed, 2 * _PERIOD) if sleeps and is_collective(frame) else 0.0
                self.waited += waited
                self.own += passed - waited


def _in_training(frame: FrameType) -> bool:
    """Whether the innermost of the loops' functions is the loop of updates itself."""
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code.co_filename == _LOOP:
            return inner.f_code.co_name == "train_steps"
        inner = inner.f_back
    return False


def _only_gloo() -> bool:
    """Whether all collectives are done by gloo, and so waited for by the thread that asks for them."""
    distributed = torch.distributed
    if not distributed.is_initialized():
        return False
    # Such as "cpu:gloo,cuda:nccl", for each process group. torch has no public list of the groups.
    backends = list(distributed.distributed_c10d._world.pg_backend_config.values())
    return all(each.endswith(":gloo") for backend in backends for each in str(backend).split(","))
