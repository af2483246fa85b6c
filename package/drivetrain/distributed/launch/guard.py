"""A program that kills ranks which outlive the process that has started them; it imports nothing of ours.

It waits until that process, rank 0, has ended, and gives the other ranks some seconds to report it. Then it
kills those that are left, and removes the folder where they have met. It holds all of them by pidfd, so that
it never signals another process that has got the same number.

A parent looks for exit codes ten times a second, and a rank that has failed stays a zombie until then. A
parent that leaves one for `patience` seconds cannot run any thread, and is killed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress


def main(last_words: float, store: str, patience: int, parent: int, *ranks: int) -> None:
    """Wait for the end of the parent or of a rank that it does not notice.

    Args:
        last_words: Seconds that a rank has to report its parent's death.
        store: A file in the folder that is removed at the end.
        patience: Seconds after which a parent that does not notice a failure is killed; 0 lets it be.
    """
    end, running = _opened(parent), {_opened(each): each for each in ranks}
    running.pop(-1, None)
    failed: dict[int, float] = {}  # ranks whose exit code the parent has not taken, and since when
    while end >= 0 and os.getppid() == parent:
        ended = select.select([end, *running], [], [], 1 if failed else None)[0]
        if end in ended:
            break
        failed |= {running.pop(each): time.monotonic() for each in ended}
        failed = {each: since for each, since in failed.items() if patience and _unread_code(each, parent)}
        first = min(failed, key=failed.__getitem__, default=0)
        if first and time.monotonic() - failed[first] >= patience:
            number, how = ranks.index(first) + 1, _ending(_unread_code(first, parent))
            _kill(running)
            running = {}
            sys.stderr.write(
                f"drivetrain: rank {number} failed first: it {how}. A call of rank 0 has kept its"
                f" interpreter's lock for {patience} s since then, and rank 0 was killed\n"
            )
            _kill([end])
            break
    until = time.monotonic() + last_words
    while running and time.monotonic() < until:
        for each in select.select([*running], [], [], max(0.0, until - time.monotonic()))[0]:
            del running[each]
    for each in _kill(running):
        sys.stderr.write(
            f"drivetrain: rank 0 has ended, and process {running[each]}, another rank, was killed\n"
        )
    shutil.rmtree(os.path.dirname(store), ignore_errors=True)


def _opened(pid: int) -> int:
    """Return a descriptor of a process, which can be read from once that has ended; -1 if it is gone."""
    with suppress(OSError):
        return os.pidfd_open(pid)
    return -1


def _unread_code(pid: int, parent: int) -> int:
    """Return the wait status, other than 0, of a child of the parent that is a zombie; otherwise 0."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, above, *rest = file.read().rpartition(")")[2].split()
        return int(rest[-1]) if state == "Z" and int(above) == parent else 0
    return 0


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _kill(processes: Iterable[int]) -> list[int]:
    """Kill processes by their descriptors; return those that still ran."""
    killed = []
    for each in processes:
        with suppress(OSError):
            signal.pidfd_send_signal(each, signal.SIGKILL)
            killed.append(each)
    return killed


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
