"""The failure channel of a training loop of the user's own: from its set-up to the end of the program."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from drivetrain.core.errors import RankFailure
from drivetrain.core.progress import Progress
from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.ranks import Ranks


class ProgramChannel:
    """A failure channel that stays open until `close` or the end of the program.

    If the program ends by an error, the error is reported before the interpreter shuts down, while the other
    ranks still wait for this one. All ranks must open it; with one rank it does nothing.
    """

    def __init__(self, ranks: Ranks, progress: Progress) -> None:
        self._rank, self._size, self._progress, self._order = ranks.rank, ranks.size, progress, ranks.order
        self._channel: FailureChannel | None = None
        self._finalize: Finalize | None = None

    def open(self) -> None:
        """Open the channel, if it is closed."""
        if self._channel is not None or self._size == 1:
            return
        progress = self._progress
        self._channel = FailureChannel(
            self._rank,
            self._size,
            status=Status(lambda: f"after step {progress.steps}", lambda: progress.steps),
            order=self._order,
        )
        self._pid = os.getpid()
        self._channel.__enter__()
        if parent_process() is not None:  # a process of multiprocessing does not call atexit functions
            self._finalize = Finalize(None, self._end, exitpriority=100)
        atexit.register(self._end)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the channel, if it is open, with this rank's error or None.

        Raises:
            RankFailure: On rank 0: another rank has failed.
        """
        channel, self._channel = self._channel, None
        if channel is None:
            return
        atexit.unregister(self._end)
        if self._finalize is not None:
            self._finalize.cancel()
        channel.__exit__(None if error is None else type(error), error, None)

    def leave(self, release: Callable[[], None]) -> None:
        """Close the channel, with the error being handled if any, and release what the ranks share."""
        error = sys.exc_info()[1]
        with ExitStack() as stack:
            if error is None:
                stack.callback(self.close)
            stack.callback(release)
            if error is not None:  # before anything that waits for other ranks
                self.close(error)

    def _end(self) -> None:
        if os.getpid() != self._pid:  # a fork of this process
            return
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        told = len(getattr(error, "__notes__", ()))
        try:
            self.close(error)
        except RankFailure as failure:  # nothing can catch it any more, and the exit code must not be 0
            traceback.print_exception(failure.with_traceback(None))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        for note in getattr(error, "__notes__", ())[told:]:  # its traceback was printed without these notes
            sys.stderr.write(f"{note}\n")
