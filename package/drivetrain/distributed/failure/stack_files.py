"""The stacks of a failed job's processes, as files in its run directory."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
import threading
import time
import traceback
from pathlib import Path

from drivetrain.core.files import open_file
from drivetrain.distributed.failure.messages import at
from drivetrain.distributed.processes import is_grouped

_COLLECTIVES = 20
"""Collectives that a rank's file lists."""

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


def last_collectives() -> str:
    """Return the last collectives of torch's flight recorder, one a line, the newest last; "" without one.

    https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
    """
    if not is_grouped():
        return ""
    from torch._C import _distributed_c10d as recorder

    found = json.loads(recorder._dump_fr_trace_json())  # type: ignore[attr-defined]
    counts = found.get("pg_status", {})
    lines = []
    for each in found.get("entries", ())[-_COLLECTIVES:]:
        number, group = int(each["collective_seq_id"]), each["process_group"]
        known = counts.get(str(each["pg_id"]), {})
        ended = each["state"] == "completed" or number <= int(known.get("last_completed_collective", -1))
        sizes = " ".join(map(str, each["input_sizes"]))
        state = "ended" if ended else "not ended"
        lines.append(f"collective {number} of group {group[0]}: {each['profiling_name']} {sizes}: {state}\n")
    return "".join(lines)


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
        title = f"rank {self._rank}, {at(where)}"
        with contextlib.suppress(Exception):  # torch's format may change
            title = f"{title}\n{last_collectives()}".rstrip()
        try:
            write_stacks(directory / f"rank{self._rank}.txt", title, error)
        except OSError as failed:  # the disk may be why the run has failed
            with contextlib.suppress(Exception):
                sys.stderr.write(f"drivetrain: the stacks of rank {self._rank} were not saved: {failed}\n")
