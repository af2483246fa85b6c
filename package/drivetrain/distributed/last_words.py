"""How a process ends when its job has failed, and nothing else may keep it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def record(error: BaseException) -> None:
    """For the summary of torchrun, which otherwise knows no more than an exit code."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing import errors

        errors.get_error_handler().record_exception(error)


def end_now(code: int) -> NoReturn:
    """End this process at once, with an exit code, after what it has written so far."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
            stream.flush()
    os._exit(code)
