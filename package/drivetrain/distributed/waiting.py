"""Whether a process does nothing but wait for the others of its job, and in which line of its program."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from drivetrain.distributed.sockets import own_connections

_TORCH = os.path.join(Path(torch.__file__).parent, "")
_OURS = os.path.join(Path(__file__).parents[1], "")
_BETWEEN = tuple(
    os.path.join(Path(torch.__file__).parents[1], name, "") for name in ("deepspeed", "accelerate")
)
"""Where strategies' libraries are, whose lines say as little of the user's program as torch's."""

_COLLECTIVE = tuple(
    os.path.join(_TORCH, *name.split("/"))
    for name in (
        "distributed/distributed_c10d.py",
        "distributed/_functional_collectives.py",
        "distributed/utils.py",
        "distributed/fsdp/",
        "distributed/tensor/",
        "nn/parallel/distributed.py",
    )
)
"""Where torch waits for other processes. Its checkpoints are left out: they wait for a disk."""

_BACKWARD = os.path.join(_TORCH, "autograd", "graph.py")
_OPERATOR = os.path.join(_TORCH, "_ops.py")

_MOVED = 1e-3
"""Seconds of a core: a thread that has used as much between two looks did something."""

_BUSY = 0.1
"""The share of a core that a process at rest may use, for what the back end's threads and ours look at."""

_IPPROTO_TCP = 6
_TCP_INFO = 11
_LISTENING = 10


class Waiting:
    """Looks at the thread that has made it, again and again, from another thread.

    A process is at rest when this thread sleeps inside a collective, or inside a backward that averages
    gradients, and neither it nor the process's other threads have used a core since the last look; and when
    nothing has come or gone since then over any of its TCP connections, nor is under way. When all processes
    of a job are at rest at once, what each waits for can come from nobody: they wait for ever.

    A look takes some 20 us, and 100 us more where the thread is found in a collective. Only Linux tells all
    that is needed, and only gloo waits where it can be seen: NCCL's collectives are waited for by the GPU.

    Attributes:
        looks: How many looks in a row have found the process at rest.
        place: Where the thread was when it was last found in a collective, such as "barrier (train.py:30)".
    """

    def __init__(self) -> None:
        self.looks = 0
        self.place = ""
        self._thread = threading.get_ident()
        self._stat = f"/proc/self/task/{threading.get_native_id()}/stat"
        self._can_tell = sys.platform == "linux"
        self._clock = time.pthread_getcpuclockid(self._thread) if self._can_tell else 0
        self._before: tuple[float, float, float, int] | None = None

    def look(self) -> None:
        """Look again."""
        found = self._at_rest() if self._can_tell else None
        if found is None:
            self.looks, self._before = 0, None
            return
        before, self._before = self._before, found
        if before is None:
            self.looks = 0
            return
        now, own, everything, traffic = (new - old for new, old in zip(found, before, strict=True))
        is_still = own < _MOVED and everything < _BUSY * now + _MOVED and traffic == 0
        self.looks = self.looks + 1 if is_still else 0

    def _at_rest(self) -> tuple[float, float, float, int] | None:
        """The time, the cores' time used by the thread and by the process, and the bytes come and gone; None
        when the thread is not asleep in a collective.
        """
        # In this order: whoever is seen in a collective, and has not used a core since, is still there.
        own = time.clock_gettime(self._clock)
        place = _place(sys._current_frames().get(self._thread))
        if place is None or not only_gloo() or self._state() != "S":
            return None
        self.place = place
        traffic = _traffic()
        return None if traffic is None else (time.monotonic(), own, time.process_time(), traffic)

    def _state(self) -> str:
        # A thread that sleeps in a page of a file that is yet to be read is in "D".
        return Path(self._stat).read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


def _place(innermost: FrameType | None) -> str | None:
    """In which collective a thread is, and in which line of the user's; None for anything else."""
    if innermost is None or not is_collective(innermost):
        return None
    name = None
    for frame in _outward(innermost):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith((_TORCH, _OURS, *_BETWEEN)) or frame.f_back is None:
            return f"{name or 'a collective'} ({Path(file).name}:{frame.f_lineno})"
        if name is None and file.startswith(_TORCH) and not function.startswith(("_", "wrapper")):
            name = function
    return name


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_collective(frame: FrameType) -> bool:
    if frame.f_code.co_filename == _OPERATOR and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file.startswith(_COLLECTIVE) or (
        file == _BACKWARD and frame.f_code.co_name == "_engine_run_backward"
    )


def only_gloo() -> bool:
    """Whether all collectives are done by gloo: over TCP, and waited for by the thread that asks for them."""
    distributed = torch.distributed
    if not distributed.is_initialized():
        return False
    # Such as "cpu:gloo,cuda:nccl", for each process group. torch has no public list of the groups.
    backends = list(distributed.distributed_c10d._world.pg_backend_config.values())
    return all(each.endswith(":gloo") for backend in backends for each in str(backend).split(","))


def _traffic() -> int | None:
    """Bytes that have come and gone over this process's TCP connections; None while some are under way.

    The failure channel's own are left out: they are never still.
    """
    total = 0
    own = own_connections()
    info, size = ctypes.create_string_buffer(256), ctypes.c_uint32()
    get = ctypes.CDLL(None).getsockopt
    for each in os.listdir("/proc/self/fd"):
        size.value = len(info)
        if int(each) in own or get(int(each), _IPPROTO_TCP, _TCP_INFO, info, ctypes.byref(size)) != 0:
            continue  # no TCP connection, or no longer open
        # struct tcp_info of linux/tcp.h: tcpi_unacked; tcpi_bytes_acked and _received; tcpi_notsent_bytes.
        (unacknowledged,) = struct.unpack_from("I", info, 24)
        gone, come = struct.unpack_from("QQ", info, 120)
        (unsent,) = struct.unpack_from("I", info, 144)
        if info.raw[0] != _LISTENING and (unacknowledged or unsent):
            return None
        total += gone + come
    return total or None  # a system that counts nothing, such as a sandbox's, cannot be trusted with it
