"""Whether a thread sleeps for so long, or waits for a lock in such a way, that it will not come back."""

from __future__ import annotations

import os
import platform
import re
import struct
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TypeAlias

FOREVER = 300.0
"""Seconds: a single sleep longer than that is no pause between two attempts at something."""

_CALLS = {"x86_64": {230: "sleep", 202: "lock"}, "aarch64": {115: "sleep", 98: "lock"}}
"""Numbers of clock_nanosleep and futex in Linux, by architecture (unistd.h)."""

_TIMER_ABSTIME = 1
_BITSET = 9
_WAITS = (0, _BITSET)
"""FUTEX_WAIT and FUTEX_WAIT_BITSET of linux/futex.h, of which the second has its limit as a point in time."""

_REALTIME = 256
"""FUTEX_CLOCK_REALTIME."""

_LOCKS = threading.__file__
"""Where Python code waits for a lock that only Python code can release."""

_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OURS = os.path.join(Path(__file__).parents[1], "")
_NOT_THE_USERS = (
    _OURS,
    os.path.join(Path(_LOCKS).parent, ""),
    os.path.join(sysconfig.get_path("scripts"), ""),
    "<frozen ",
)
"""What is no program of the user's: ours, Python's own, what starts an installed one."""

_Call: TypeAlias = tuple[str, list[int], str]
"""A call that a thread is in: its kind, its arguments, and the system's own words."""

_SERVING = os.path.join(Path(_LOCKS).parent, "multiprocessing", "resource_sharer.py")


class Asleep:
    """Looks at the thread that has made it, again and again, from another thread.

    It sleeps for ever where the system's own record says so: it is in a single `time.sleep` that has more
    than five minutes to go; or it waits in `threading` for a lock or for a thread's end, without a limit of
    time or with such a one, and every other thread of Python's, which alone could release it, waits or sleeps
    just so. A pause between two
    attempts, a wait for a disk, a network, a terminal, a worker or another program is none of these, and is
    never taken for one.

    Only Linux tells this, on x86-64 and aarch64.

    Attributes:
        looks: How many looks in a row have found it in one and the same such wait.
        place: In which line of its program, such as "sleep (train.py:30)".
    """

    def __init__(self) -> None:
        self.looks = 0
        self.place = ""
        self._thread = threading.get_ident()
        self._native = threading.get_native_id()
        self._calls = _CALLS.get(platform.machine(), {}) if sys.platform == "linux" else {}
        self._before: str | None = None

    def look(self) -> None:
        """Look again."""
        found = self._final_call() if self._calls else None
        self.looks = self.looks + 1 if found is not None and found == self._before else 0
        self._before = found

    def _final_call(self) -> str | None:
        """The call of the system's that the thread does not come back from; None while it may."""
        frame = sys._current_frames().get(self._thread)
        call = self._call(self._native)
        if frame is None or call is None:
            return None
        kind, _, text = call
        if not _is_final(frame, call) or (kind == "lock" and not self._others_wait()):
            return None
        frame = _users(frame)
        self.place = f"{kind} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        return text

    def _call(self, native: int) -> _Call | None:
        """In which call a thread is."""
        try:
            text = Path(f"/proc/self/task/{native}/syscall").read_text(encoding="ascii")
            number, *rest = text.split()
            kind = self._calls.get(int(number))
            return None if kind is None else (kind, [int(each, 16) for each in rest], text)
        except (OSError, ValueError):  # a system that does not tell; or the thread runs
            return None

    def _others_wait(self) -> bool:
        """Whether all other threads of Python's are our own, or sleep or wait for a lock just so."""
        known = {each.ident: each for each in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            thread = known.get(ident)
            if ident == self._thread or (thread is not None and thread.name.startswith("drivetrain-")):
                continue
            if thread is None or thread.native_id is None:
                return False
            call = self._call(thread.native_id)
            if (call is None or not _is_final(frame, call)) and not _only_serves(frame):
                return False
        return True


def _is_final(frame: FrameType, call: _Call) -> bool:
    """Whether a thread is in a sleep that never ends, or waits so for a lock, which others may release."""
    kind, words, _ = call
    if kind == "lock":
        return frame.f_code.co_filename == _LOCKS and _is_far(words)
    until = _time_at(words[2])
    if words[1] & _TIMER_ABSTIME:
        until -= time.clock_gettime(words[0])
    return until > FOREVER


def _users(innermost: FrameType) -> FrameType:
    """The innermost frame of the user's program; where all of it is installed, of that which is not ours."""
    installed = None
    frame: FrameType | None = innermost
    while frame is not None:
        file = frame.f_code.co_filename
        if _INSTALLED.search(file):
            installed = installed or (None if file.startswith(_OURS) else frame)
        elif not file.startswith(_NOT_THE_USERS):
            return frame
        frame = frame.f_back
    return installed or innermost


def _only_serves(frame: FrameType) -> bool:
    """Whether a thread is multiprocessing's own, which hands descriptors to other processes."""
    inner: FrameType | None = frame
    while inner is not None:
        if inner.f_code.co_name == "_serve" and inner.f_code.co_filename == _SERVING:
            return True
        inner = inner.f_back
    return False


def _is_far(words: list[int]) -> bool:
    """Whether a call to futex waits, with no end in sight."""
    operation = words[1] & 0x7F
    if operation not in _WAITS:
        return False
    if not words[3]:
        return True
    left = _time_at(words[3])
    if operation == _BITSET:
        left -= time.time() if words[1] & _REALTIME else time.monotonic()
    return left > FOREVER


def _time_at(address: int) -> float:
    """The `struct timespec` at an address of this process; 0 where there is none any more."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            seconds, nanoseconds = struct.unpack("qq", memory.read(16))
    except (OSError, OverflowError, struct.error):
        return 0.0
    return float(seconds) + float(nanoseconds) * 1e-9
