"""The share of a rank's training time that it spends on its own work, and on waiting for other ranks."""

from __future__ import annotations

import random
import sys
import threading
import time
from types import CodeType, FrameType

import torch

from drivetrain.distributed.failure.messages import is_collective

_PERIOD = 0.05
"""Seconds between two samples, on average. A sample takes some 10 us, so they cost 0.02 % of a core."""


class TimeShares:
    """Samples the thread that has made it 20 times a second, at random times, from a thread of its own.

    At equal distances, updates that take a multiple of the distance would be looked at in one place only.

    A collective takes all ranks equally long by the clock: the slow one works while the others wait for it.
    So each sample counts the time since the last one as waiting if the thread sleeps in a collective, or in
    a backward that averages gradients. Anything else (computing, reading data, sleeping) counts as the
    rank's own work. Only training counts, because rank 0 has more evaluation, logging and saving to do than
    the others. Sampling costs the step nothing, waits for no device and exchanges nothing.

    It needs Linux and a back end, such as gloo, whose collectives block the calling thread.

    Args:
        loop: The code of the function that loops over updates.

    Attributes:
        own: Seconds of the rank's own work so far.
        waited: Seconds of waiting so far.
    """

    def __init__(self, loop: CodeType) -> None:
        self._loop = loop
        self.own = self.waited = 0.0
        self._thread = threading.get_ident()
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._done = threading.Event()
        self._looking = threading.Thread(target=self._look, name="drivetrain-shares", daemon=True)

    @staticmethod
    def is_supported() -> bool:
        """Return whether sampling works on this system and back end."""
        return sys.platform == "linux" and _only_gloo()

    def start(self) -> None:
        """Start sampling."""
        self._looking.start()

    def stop(self) -> None:
        """Stop sampling."""
        self._done.set()
        self._looking.join()

    def _look(self) -> None:
        before = time.monotonic()
        chance = random.Random()  # the user's own random numbers stay as they are
        with open(self._stat, "rb", buffering=0) as stat:
            while not self._done.wait(chance.uniform(0.5, 1.5) * _PERIOD):
                frame = sys._current_frames().get(self._thread)
                stat.seek(0)
                sleeps = stat.read(512).rpartition(b") ")[2][:1] == b"S"
                now = time.monotonic()
                passed, before = now - before, now
                if frame is None or not _is_in(self._loop, frame):
                    continue
                # A longer gap is this process's own work: a call held the interpreter.
                waited = min(passed, 2 * _PERIOD) if sleeps and is_collective(frame) else 0.0
                self.waited += waited
                self.own += passed - waited


def _is_in(loop: CodeType, frame: FrameType) -> bool:
    """Return whether the innermost function of the loop's file is the loop itself, and no evaluation."""
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code.co_filename == loop.co_filename:
            return inner.f_code is loop
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
