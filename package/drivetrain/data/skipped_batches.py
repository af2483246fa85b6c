"""Batches that could not be made: their placeholder, and how many of them a run leaves out."""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from typing import Any, Final

from torch.utils.data import get_worker_info

from drivetrain.core.errors import DataError
from drivetrain.core.messages import logger
from drivetrain.core.out_of_memory import is_out_of_memory

_LOG = logger(__name__)

IN_A_ROW = 10
"""Bad batches in a row, on one process, that are no accident any more."""

SHARE = 0.1
"""The share of bad batches that a process may read, once it has read more than `IN_A_ROW` of them."""


BAD: Final = object()
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
        self.text = "".join(traceback.format_exception_only(error)).strip()
        self.traceback = "".join(traceback.format_exception(error)).rstrip()
        self._pickled: bytes | None = None
        with suppress(Exception):
            self._pickled = pickle.dumps(error)

    def error(self) -> Exception:
        """Rebuild the error as far as it could be sent, with the worker's traceback as a note."""
        error: Exception = RuntimeError(self.text)
        with suppress(Exception):  # the user's constructor may fail
            error = pickle.loads(self._pickled or b"")
        error.add_note(f"in worker {self.worker} (pid {self.pid}):\n{self.traceback}")
        return error


class BadBatchSkipper:
    """Leaves out bad batches, reports each, and raises if they are too many.

    Attributes:
        read: The number of batches read so far.
        in_a_row: The number of the last ones that were bad.
        bad: The number of bad ones in all.
    """

    def __init__(self) -> None:
        self.read = self.in_a_row = self.bad = 0

    def skip(self, failure: DataError, error: Exception) -> Any:
        """Report a bad batch and return its placeholder.

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
        text = f"{failure}; the batch is left out (on_bad_batch='skip')"
        _LOG.warning(text)
        return BAD
