"""The stacks of all ranks of a job that fails, as files in its run directory."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.distributed.failure_wire import at
from drivetrain.distributed.stacks import stacks

if TYPE_CHECKING:
    from drivetrain.distributed.failure_hub import Hub

_WRITING = 2.0
"""Seconds that a process waits for them at its end: what hangs may be the disk."""

_OWN = 0.8
"""Seconds that the ranks of rank 0's machine have to write theirs themselves, before they are asked."""

_UNASKED = "It could not be asked: it has ended, or is on another machine.\n"


def now() -> str:
    """This moment, as a directory's name."""
    return time.strftime("%Y%m%d-%H%M%S")


class StackFiles:
    """This rank's part: its own file, and on rank 0 those of ranks of its machine that do not write theirs.

    Args:
        rank: This process.
        world_size: Of how many.
        directory: The run directory; None writes nothing.

    Attributes:
        told: A line that says where they are; empty where there are none.
    """

    def __init__(self, rank: int, world_size: int, directory: Path | None) -> None:
        self.told = ""
        self._rank = rank
        self._size = world_size
        self._directory = directory
        self._thread: threading.Thread | None = None

    def open(self, began: str) -> tuple[int, int]:
        """Be ready.

        Args:
            began: When rank 0 began, which names the directory on all ranks alike.

        Returns:
            The signal by which rank 0 may ask for the stacks, and the file that they go to then.
        """
        if self._directory is not None:
            self._directory = self._directory / "failures" / began
        stacks.open()  # also without a directory: a loader's workers may be started before it is known
        return stacks.signal, stacks.descriptor

    def begin(self, where: str, error: BaseException | None, hub: Hub | None) -> None:
        """Write them, in a thread of their own.

        Args:
            where: How far this rank is.
            error: What was raised here, if something was.
            hub: On rank 0, which knows of the others.
        """
        if self._directory is None or self._thread is not None:
            return
        self.told = f"the stacks of all ranks are in {self._directory}"
        # The frames are those of this moment as long as the thread is quick; it cannot be waited for.
        self._thread = threading.Thread(
            target=self._write,
            args=(self._directory, where, error, hub),
            name="drivetrain-stacks",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until they are written, for as long as that may take."""
        if self._thread is not None:
            self._thread.join(_WRITING)

    def _write(self, directory: Path, where: str, error: BaseException | None, hub: Hub | None) -> None:
        try:
            with contextlib.suppress(FileExistsError):  # rank 0 did not get an answer for too long
                stacks.write(_file(directory, self._rank), f"rank {self._rank}, {at(where)}", error)
            if hub is not None:
                self._write_others(directory, hub)
        except OSError as failed:  # the disk may be what the run has failed for
            with contextlib.suppress(Exception):
                sys.stderr.write(f"drivetrain: the stacks of rank {self._rank} were not saved: {failed}\n")

    def _write_others(self, directory: Path, hub: Hub) -> None:
        until = time.monotonic() + _OWN
        files = {rank: _file(directory, rank) for rank in range(1, self._size)}
        while not all(each.exists() for each in files.values()) and time.monotonic() < until:
            time.sleep(0.02)
        for rank, file in files.items():
            had = hub.had.get(rank)  # before it was ended: what it has written since tells of later
            if had is not None or not file.exists():
                text = (hub.ask(rank) if had is None else had) or _UNASKED
                title = f"rank {rank}, asked by rank 0 because it did not answer"
                file.write_text(f"{title}\n\n{text}", encoding="utf-8")


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.txt"
