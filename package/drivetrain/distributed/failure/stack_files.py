"""The stacks of all ranks of a failed job, as files in its run directory."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.files import open_file
from drivetrain.distributed.failure.messages import at
from drivetrain.distributed.failure.stacks import stacks

if TYPE_CHECKING:
    from drivetrain.distributed.failure.monitor import Monitor

_WRITING = 2.0
"""Seconds that a process waits for them at its end: the disk may be what hangs."""

_OWN = 0.8
"""Seconds that the ranks of rank 0's machine have to write theirs, before rank 0 asks for them."""

_UNASKED = "No stacks: the rank has ended, or is on another machine.\n"


def now() -> str:
    """Return the current time as a directory name."""
    return time.strftime("%Y%m%d-%H%M%S")


class StackFiles:
    """One rank's stack file; rank 0 also writes those of ranks on its machine that do not write theirs.

    Attributes:
        directory: The run directory; None writes no files.
        told: A line that says where the files are; empty without files.
    """

    def __init__(self, rank: int, world_size: int, directory: Path | None) -> None:
        self.told = ""
        self._rank = rank
        self._size = world_size
        self.directory = directory
        self._began = ""
        self._thread: threading.Thread | None = None

    def open(self, began: str) -> tuple[int, int]:
        """Prepare to write.

        Args:
            began: When rank 0 began, which is the directory's name on all ranks.

        Returns:
            The signal that asks for the stacks, and the descriptor of the file that they then go to.
        """
        self._began = began
        stacks.open()  # even without a directory: a loader's workers may start before it is known
        return stacks.signal, stacks.descriptor

    def begin(self, where: str, error: BaseException | None, monitor: Monitor | None) -> None:
        """Write the stacks in a thread of their own."""
        if self.directory is None or self._thread is not None:
            return
        directory = self.directory / "failures" / self._began
        self.told = f"the stacks of all ranks are in {directory}"
        # If the thread is quick, the frames are still those of this moment; waiting for it is not possible.
        self._thread = threading.Thread(
            target=self._write,
            args=(directory, where, error, monitor),
            name="drivetrain-stacks",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until they are written, for at most `_WRITING` seconds."""
        if self._thread is not None:
            self._thread.join(_WRITING)

    def _write(
        self, directory: Path, where: str, error: BaseException | None, monitor: Monitor | None
    ) -> None:
        try:
            # Rank 0 may not have waited, and have begun the file; only this rank knows its error.
            stacks.write(_file(directory, self._rank), f"rank {self._rank}, {at(where)}", error)
            if monitor is not None:
                self._write_others(directory, monitor)
        except OSError as failed:  # the disk may be why the run has failed
            with contextlib.suppress(Exception):
                sys.stderr.write(f"drivetrain: the stacks of rank {self._rank} were not saved: {failed}\n")

    def _write_others(self, directory: Path, monitor: Monitor) -> None:
        until = time.monotonic() + _OWN
        files = {rank: _file(directory, rank) for rank in range(1, self._size)}
        while not all(each.exists() for each in files.values()) and time.monotonic() < until:
            time.sleep(0.02)
        for rank, file in files.items():
            had = monitor.had.get(rank)  # taken before it was killed: its own file describes a later moment
            if had is not None or not file.exists():
                text = (monitor.ask(rank) if had is None else had) or _UNASKED
                title = f"rank {rank}, asked by rank 0 because it did not answer"
                with open_file(file, "a" if had is None else "w", encoding="utf-8") as out:
                    out.write(f"{title}\n\n{text}\n")


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.txt"
