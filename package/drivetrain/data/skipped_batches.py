"""Batches that could not be made: their placeholder, and how many of them a run leaves out."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from typing import Any, Final

from torch.utils.data import get_worker_info

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import is_out_of_memory
from drivetrain.distributed.failure.messages import summary

_LOG = logger(__name__)

IN_A_ROW = 10
"""Bad batches in a row, on one process, that are no accident any more."""

SHARE = 0.1
"""The share of bad batches that a process may read, once it has read more than `IN_A_ROW` of them."""


class BadSample(Exception):  # noqa: N818 - says that the stream goes on after the sample
    """A sample of a stream that raised and was left out."""


class _BadBatch:
    """The type of `BAD`."""

    def __repr__(self) -> str:
        return "a batch that was left out"


BAD: Final = _BadBatch()
"""The value in place of a batch that was left out."""


class Raised:
    """A worker's message that it could not make a batch.

    torch's own wrapper pickles the error's class. A class that cannot be pickled, such as one defined in a
    function, would leave the training waiting for ever. This message can always be pickled.
    """

    def __init__(self, error: Exception) -> None:
        worker = get_worker_info()
        self.worker = -1 if worker is None else worker.id
        self.pid = os.getpid()
        self.text = summary(error)
        self.traceback = "".join(traceback.format_exception(error)).rstrip()
        self._made_by = _made_by(error)

    def error(self) -> Exception:
        """Rebuild the error as far as it could be sent, with the worker's traceback as its cause."""
        error: Exception = RuntimeError(self.text)
        if self._made_by is not None:
            kind, arguments = self._made_by
            with suppress(Exception):  # the user's constructor may fail
                error = kind(*arguments)
        error.__cause__ = _InWorker(f"in worker {self.worker} (pid {self.pid}):\n{self.traceback}")
        return error


class _InWorker(Exception):  # noqa: N818 - shown in tracebacks as a worker's traceback
    """A worker's traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _made_by(error: Exception) -> tuple[type[Exception], tuple[Any, ...]] | None:
    """Return a class and plain arguments to rebuild the error in another process, or None."""
    kind = type(error)
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    plain = all(each is None or isinstance(each, (str, int, float)) for each in error.args)
    return (kind, error.args) if found is kind and plain else None


class BadBatchSkipper:
    """Leaves out bad batches, reports each, and raises if they are too many.

    Attributes:
        read: The number of batches read so far.
        in_a_row: The number of the last ones that were bad.
        bad: The number of bad ones in all.
    """

    def __init__(self) -> None:
        self.read = self.in_a_row = self.bad = 0

    def note_good(self) -> None:
        """Count a batch that was read."""
        self.read += 1
        self.in_a_row = 0

    def skip(self, failure: DataError, error: Exception, what: str = "batch") -> Any:
        """Report a bad batch, or a bad sample of a stream, and return its placeholder.

        Raises:
            DataError: There are too many; or memory has run out, which is not the data's fault.
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
                f"{failure}; on_bad_batch='skip' leaves out no more: {many}, which is no accident. Repair the"
                " data, or remove the bad samples"
            ) from error
        text = f"{failure}; the {what} is left out (on_bad_batch='skip')"
        _LOG.warning(text)
        return BAD
