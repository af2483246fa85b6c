"""Requests to a storage service: which failures are transient, when to retry, and how to report them.

Nothing here knows the service. Errors are classified by their HTTP status, their class, and the names of
their base classes, so that no client package is imported.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from drivetrain.core.messages import logger

T = TypeVar("T")

_LOG = logger(__name__)
# Not the global generator: a run's random numbers must not depend on the network. For the same reason
# botocore's retries, which draw from that generator, are off.
_CHANCE = random.SystemRandom()

_PERMANENT = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
# Codes that Amazon S3 and compatible services send with other statuses:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_TRANSIENT_CODE = re.compile(
    "BadDigest|IncompleteBody|OperationAborted|RequestTimeout|SlowDown|Throttling|SHA256"
)
# Classes of aiohttp, botocore, urllib3, google.api_core and azure.core for a broken connection. A rejected
# certificate looks like one, and is excluded below.
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
# s3fs's number for a status of 500; not every system has it.
_EREMOTEIO = getattr(errno, "EREMOTEIO", errno.EIO)


@dataclass(frozen=True, slots=True)
class Retry:
    """The policy for repeating requests after transient failures.

    The limit of a pause doubles with each failure. The pause is a random time between half of its limit and
    its limit, so that a thousand processes that were asked to slow down do not retry all at once
    (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).

    Attributes:
        tries: The largest number of requests, including the first one.
        pause: The limit of the first pause, in seconds.
        longest: The highest limit of a pause, in seconds.
        patience: The seconds after which no request is repeated.
    """

    tries: int = 8
    pause: float = 0.5
    longest: float = 16.0
    patience: float = 300.0

    def draw_pause(self, failures: int) -> float:
        """Return the seconds to wait after this number of failures."""
        top = min(self.longest, self.pause * 2 ** (failures - 1))
        return _CHANCE.uniform(top / 2, top)

    def call(self, what: str, path: str, request: Callable[[], T]) -> T:
        """Make a request, and repeat it after transient failures.

        Args:
            what: The action, such as "reading", for the log.
            path: The path that it acts on.
            request: Makes the request and returns its result.

        Raises:
            OSError: The service or the network failed.
        """
        begun, failures = time.monotonic(), 0
        while True:
            try:
                return request()
            except MemoryError:
                raise
            except Exception as error:
                failures += 1
                is_last = failures == self.tries or time.monotonic() - begun > self.patience
                if is_last or not is_transient(error):
                    raise as_os_error(error, path) from error
                pause = self.draw_pause(failures)
                _LOG.warning(
                    f"{what} {path!r}: {_text_of(error)} ({type(error).__name__}); trying again in"
                    f" {pause:.1f} s ({failures + 1} of {self.tries})"
                )
            time.sleep(pause)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: the service is busy, or the connection broke.

    False if something is missing or forbidden, or the request is wrong: repeating it does not help.
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
    """Return an error as an `OSError` with a number for its kind.

    The number is never EIO, which means lost bytes on a disk: a failing service has lost nothing.
    """
    code = _errno_of(error)
    text = _text_of(error)
    # Some clients say only the name: "No such file" says more.
    return OSError(code, os.strerror(code) if text in path else text, path)


def _errno_of(error: Exception) -> int:
    for kind, code in _ERRNO_OF_CLASS.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno and error.errno not in (errno.EIO, _EREMOTEIO):
        return error.errno
    for each in _causes(error):
        status, _ = _answer(each)
        if status in _ERRNO_OF_STATUS:
            return _ERRNO_OF_STATUS[status]
        if "Credential" in _names(each):
            return errno.EACCES
    return errno.EBUSY if is_transient(error) else errno.EPROTO


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _answer(error: BaseException) -> tuple[int | None, str]:
    """Return an error's HTTP status, or None, and the service's code, or ""."""
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
