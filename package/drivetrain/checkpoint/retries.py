"""Requests to a storage service: which failures pass by themselves, when to try again, what to call them.

Nothing here knows which service it is: errors are told apart by the HTTP status that they carry, by their
class, and by the names of their classes, so that none of the clients' packages is imported.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain.errors import MissingDependencyError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
# Not the global generator: the random numbers of a run must not depend on how the network was. For the same
# reason botocore's own retries, which draw from that generator, are off.
_CHANCE = random.SystemRandom()

_PERMANENT = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
# What Amazon S3, and what speaks its language, gives with other statuses:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_TRANSIENT_CODE = re.compile(
    "BadDigest|IncompleteBody|OperationAborted|RequestTimeout|SlowDown|Throttling|SHA256"
)
# Classes of aiohttp, botocore, urllib3, google.api_core and azure.core for a connection that broke; not for a
# certificate that is refused, which looks like one.
_BROKEN = re.compile(
    "Connection|Timeout|Payload|IncompleteRead|Protocol|HTTPClient|ResponseParser|ResponseStreaming|RetryError"
    "|ServiceRequest|ServiceResponse|Transport"
)
_BROKEN_FOR_GOOD = re.compile("SSL|Credential")
_TRANSIENT_ERRNO = frozenset(
    (errno.EBUSY, errno.EAGAIN, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTUNREACH)
)
_ERRNO_OF_CLASS = {
    type(OSError(code, "")): code
    for code in (
        *(errno.ENOENT, errno.EEXIST, errno.EACCES, errno.EISDIR, errno.ENOTDIR),
        *(errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET),
    )
}
_ERRNO_OF_STATUS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 408: errno.ETIMEDOUT}
# By which s3fs tells a status of 500; not every system has the number.
_EREMOTEIO = getattr(errno, "EREMOTEIO", errno.EIO)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and for how long, a request is made again that failed for a while only.

    Pauses double, and each is drawn from its upper half, so that a thousand processes that were told to slow
    down do not come back at once (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).

    Attributes:
        tries: The most requests that are made, the first included.
        pause: The first pause, in seconds, at the most.
        longest: The longest pause, in seconds.
        patience: The seconds after which no request is made again.
    """

    tries: int = 8
    pause: float = 0.5
    longest: float = 16.0
    patience: float = 300.0

    def draw_pause(self, failures: int) -> float:
        """Return the seconds to wait after so many failures."""
        top = min(self.longest, self.pause * 2 ** (failures - 1))
        return _CHANCE.uniform(top / 2, top)

    def call(self, what: str, path: str, request: Callable[[], T]) -> T:
        """Make a request, and make it again when it fails for a while only.

        Args:
            what: What is being done, as "reading"; for the log.
            path: To what.
            request: Makes the request and returns its result.

        Raises:
            OSError: In place of any error of the service or of the way to it.
            MissingDependencyError: tenacity is not installed.
        """
        try:
            from tenacity import (
                RetryCallState,
                Retrying,
                retry_if_exception,
                stop_after_attempt,
                stop_after_delay,
            )
        except ImportError as error:
            raise MissingDependencyError("tenacity", "remote", "an object store") from error

        def report(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            pause = state.next_action.sleep if state.next_action else 0.0
            _LOG.warning(
                "%s %r: %s (%s); trying again in %.1f s (%d of %d)",
                what,
                path,
                _text_of(error),
                type(error).__name__,
                pause,
                state.attempt_number + 1,
                self.tries,
            )

        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_attempt(self.tries) | stop_after_delay(self.patience),
            wait=lambda state: self.draw_pause(state.attempt_number),
            before_sleep=report,
            reraise=True,
        )
        try:
            return retrying(request)
        except MemoryError:
            raise
        except Exception as error:
            raise as_os_error(error, path) from error


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed in a while: the service is busy, or the way to it broken.

    Not so where something is missing, forbidden, or asked in a wrong way: that stays as it is.
    """
    if isinstance(error, _PERMANENT):
        return False
    for each in _causes(error):
        status, code = _answer(each)
        if status is not None:
            return status in _TRANSIENT_STATUS or _TRANSIENT_CODE.search(code) is not None
        names = _names(each)
        if _BROKEN_FOR_GOOD.search(names):
            return False
        if _BROKEN.search(names) or (isinstance(each, OSError) and each.errno in _TRANSIENT_ERRNO):
            return True
    return False


def as_os_error(error: Exception, path: str) -> OSError:
    """Return the same error as an `OSError` whose number tells the kind.

    Never EIO, by which a disk says that bytes are lost: a service that fails has lost nothing.
    """
    code = _errno_of(error)
    text = _text_of(error)
    # "No such file" in place of a bare name, which is all that some clients say.
    return OSError(code, os.strerror(code) if text in path else text, path)


def _errno_of(error: Exception) -> int:
    for kind, code in _ERRNO_OF_CLASS.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno and error.errno not in (errno.EIO, _EREMOTEIO):
        return error.errno
    for each in _causes(error):
        status, _ = _answer(each)
        if status is not None:
            return _ERRNO_OF_STATUS.get(status, errno.EBUSY if is_transient(error) else errno.EPROTO)
        names = _names(each)
        if "Credential" in names:
            return errno.EACCES
        if _BROKEN.search(names) and not _BROKEN_FOR_GOOD.search(names):
            return errno.ETIMEDOUT if "Timeout" in names else errno.ECONNRESET
    return errno.EPROTO


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _answer(error: BaseException) -> tuple[int | None, str]:
    """The HTTP status that an error carries, and the service's own code; None and "" for none."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status, str(response.get("Error", {}).get("Code", ""))
    for holder in (error, response):  # azure and aiohttp, gcsfs, requests
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return int(status), ""
    return None, ""


def _names(error: BaseException) -> str:
    return " ".join(kind.__name__ for kind in type(error).__mro__)


def _text_of(error: BaseException | None) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return str(strerror or error).strip() or type(error).__name__
