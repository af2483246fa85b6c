"""Batches that could not be made: what stands in their place, and how many of them a run leaves out."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from contextlib import suppress
from typing import Any, Final

from torch.utils.data import get_worker_info

from drivetrain.errors import DataError
from drivetrain.out_of_memory import is_out_of_memory

_LOG = logging.getLogger(__name__)

IN_A_ROW = 10
"""So many bad batches one after the other, on one process, are no accident any more."""

SHARE = 0.1
"""Nor is a larger share than this of all batches that a process has read, once there are `IN_A_ROW`."""


class _Nothing:
    """Stands in the place of a batch that was left out."""

    def __repr__(self) -> str:
        return "a batch that was left out"


BAD: Final = _Nothing()
"""What a source that leaves out bad batches gives in the place of one."""


class Raised:
    """What a worker sends in the place of a batch that it could not make.

    Not torch's own wrapper: that is pickled with the error's class, and one that cannot be pickled, as the
    class of a function's own is, would leave the training waiting for ever. What travels here always can be.

    Args:
        error: What was raised.
    """

    def __init__(self, error: Exception) -> None:
        worker = get_worker_info()
        self.worker = -1 if worker is None else worker.id
        self.pid = os.getpid()
        self.text = "".join(traceback.format_exception_only(error)).strip()
        self.traceback = "".join(traceback.format_exception(error)).rstrip()
        self._made_by = _made_by(error)

    def error(self) -> Exception:
        """What was raised, as far as it could be sent, with the traceback of the worker as its cause."""
        error: Exception = RuntimeError(self.text)
        if self._made_by is not None:
            kind, arguments = self._made_by
            with suppress(Exception):  # a constructor of the user's
                error = kind(*arguments)
        error.__cause__ = _InWorker(f"in worker {self.worker} (pid {self.pid}):\n{self.traceback}")
        return error


class _InWorker(Exception):  # noqa: N818 - shown in tracebacks, where it stands for a worker's
    """A worker's traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _made_by(error: Exception) -> tuple[type[Exception], tuple[Any, ...]] | None:
    """What the error can be made of in another process: a class that is found there, and plain arguments."""
    kind = type(error)
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    plain = all(each is None or isinstance(each, (str, int, float)) for each in error.args)
    return (kind, error.args) if found is kind and plain else None


class LeavesOut:
    """Leaves out batches that could not be made, tells of each, and ends it where they are too many.

    Attributes:
        read: How many batches were asked for so far.
        in_a_row: How many of the last ones were bad.
        bad: How many of all.
    """

    def __init__(self) -> None:
        self.read = self.in_a_row = self.bad = 0
        self._told: set[str] = set()

    def leave_out(self, failure: DataError, error: Exception) -> Any:
        """What stands in the place of a batch that could not be made.

        Args:
            failure: Says which batch, and why.
            error: What was raised.

        Raises:
            DataError: There are too many, or it is a lack of memory, for which the data is not to blame.
        """
        if is_out_of_memory(error):
            raise failure from error
        self.read += 1
        self.bad += 1
        self.in_a_row += 1
        many = None
        if self.in_a_row >= IN_A_ROW:
            many = f"the last {self.in_a_row} batches were all bad"
        elif self.bad > IN_A_ROW and self.bad > SHARE * self.read:
            many = f"{self.bad} of {self.read} batches were bad, more than {SHARE:.0%}"
        if many is not None:
            raise DataError(
                f"{failure}; on_bad_batch='skip' leaves out no more: {many}, which is no accident. Mend the"
                " data, or take out of it what is bad"
            ) from error
        text = f"{failure}; the batch is left out (on_bad_batch='skip')"
        _LOG.warning(text)
        kind = type(error).__name__
        if kind not in self._told:  # the log tells of each, a warning of each kind
            self._told.add(kind)
            warnings.warn(text, stacklevel=2)
        return BAD
