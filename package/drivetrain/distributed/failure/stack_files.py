"""The stacks of a failed job's processes, as files in its run directory."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from pathlib import Path

from drivetrain.core.files import open_file
from drivetrain.distributed.failure.messages import at

_WRITING = 2.0
"""Seconds that a process waits for them at its end: the disk may be what hangs."""


def now() -> str:
    """Return the current time as a directory name."""
    return time.strftime("%Y%m%d-%H%M%S")


def write_stacks(path: Path, title: str, error: BaseException | None = None) -> None:
    """Write the stacks of all threads of this process to a file, the newest call last; make its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_file(path, "a", encoding="utf-8") as file:
        file.write(f"{title}\n\n")
        if error is not None:
            file.writelines([*traceback.format_exception(error), "\n"])
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)


class StackFiles:
    """One rank's stack file.

    Attributes:
        directory: The run directory; None writes no file.
        told: A line that says where the files are; empty without files.
    """

    def __init__(self, rank: int, directory: Path | None) -> None:
        self.told = ""
        self.directory = directory
        self._rank = rank
        self._began = ""
        self._thread: threading.Thread | None = None

    def open(self, began: str) -> None:
        """Prepare to write.

        Args:
            began: When rank 0 began, which is the directory's name on all ranks.
        """
        self._began = began
        if not faulthandler.is_enabled():
            # Otherwise an abort, as by gloo for mismatched collectives, ends the process silently.
            faulthandler.enable(file=2, all_threads=True)

    def begin(self, where: str, error: BaseException | None) -> None:
        """Write the stacks in a thread of their own."""
        if self.directory is None or self._thread is not None:
            return
        directory = self.directory / "failures" / self._began
        self.told = f"the stacks of all ranks that answered are in {directory}"
        # If the thread is quick, the frames are still those of this moment; waiting for it is not possible.
        self._thread = threading.Thread(
            target=self._write, args=(directory, where, error), name="drivetrain-stacks", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until they are written, for at most `_WRITING` seconds."""
        if self._thread is not None:
            self._thread.join(_WRITING)

    def _write(self, directory: Path, where: str, error: BaseException | None) -> None:
        try:
            write_stacks(directory / f"rank{self._rank}.txt", f"rank {self._rank}, {at(where)}", error)
        except OSError as failed:  # the disk may be why the run has failed
            with contextlib.suppress(Exception):
                sys.stderr.write(f"drivetrain: the stacks of rank {self._rank} were not saved: {failed}\n")
