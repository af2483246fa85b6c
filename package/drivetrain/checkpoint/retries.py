"""Requests to a storage service: which failures pass by themselves, when to try again, what to call them.

Nothing here knows which service it is: errors are told apart by the HTTP status that they carry, by their
class, and by the names of their classes, so that none of the clients' packages is imported.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
# Not the global generator: the random numbers of a run must not depend on how the network was.
_CHANCE = random.SystemRandom()

_PERMANENT = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
# 501 says that the service will never do it.
_TRANSIENT_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
# What Amazon S3, and what speaks its language, gives with other statuses:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_TRANSIENT_CODES = frozenset(
    (
        "BadDigest",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "XAmzContentSHA256Mismatch",
    )
)
# Classes of aiohttp, botocore, urllib3, google.api_core and azure.core for a connection that broke.
_TRANSIENT_NAMES = frozenset(
    (
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionError",
        "HTTPClientError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProtocolError",
        "ResponseParserError",
        "ResponseStreamingError",
        "RetryError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TransportError",
    )
)
# A certificate that is refused now is refused in a minute too, although it looks like a broken connection.
_PERMANENT_NAMES = frozenset(("ClientSSLError", "SSLCertVerificationError", "SSLError"))
_NO_CREDENTIALS = frozenset(("CredentialRetrievalError", "NoCredentialsError", "PartialCredentialsError"))
_TRANSIENT_ERRNO = frozenset(
    (errno.EBUSY, errno.EAGAIN, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTUNREACH)
)
_ERRNO_OF_CLASS: tuple[tuple[type[Exception], int], ...] = (
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (IsADirectoryError, errno.EISDIR),
    (NotADirectoryError, errno.ENOTDIR),
    (TimeoutError, errno.ETIMEDOUT),
    (ConnectionRefusedError, errno.ECONNREFUSED),
    (ConnectionError, errno.ECONNRESET),
    (NotImplementedError, errno.ENOSYS),
    (ValueError, errno.EINVAL),
)
_ERRNO_OF_STATUS = {
    400: errno.EINVAL,
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    408: errno.ETIMEDOUT,
    416: errno.EINVAL,
    501: errno.ENOSYS,
}


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and for how long, a request is made again that failed for a while only.

    Pauses double, and each is drawn from its upper half, so that a thousand processes that were told to slow
    down do not come back at once (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter).

    Attributes:
        tries: The most requests that are made, the first included.
        pause: The first pause, in seconds, at the most.
        longest: The longest pause, in seconds.
        patience: The seconds after which a request that has no answer counts as failed, and after which none
            is made again.
    """

    tries: int = 8
    pause: float = 0.5
    longest: float = 16.0
    patience: float = 300.0

    def draw_pause(self, failures: int) -> float:
        """The seconds to wait after so many failures."""
        top = min(self.longest, self.pause * 2 ** (failures - 1))
        return _CHANCE.uniform(top / 2, top)


class Request(Generic[T]):
    """A request that is under way, and that is made again, while its result is waited for, if it has to be.

    Args:
        what: What is being done, as "reading"; for the log.
        path: To what.
        begin: Makes the request.
        retry: When it is made again.
        check: Looks at the result, and raises if it is not to be had as it is.

    Attributes:
        tries: How many were made.
    """

    def __init__(
        self,
        what: str,
        path: str,
        begin: Callable[[], Future[T]],
        retry: Retry,
        check: Callable[[T], None] | None = None,
    ) -> None:
        self.tries = 1
        self._what = what
        self._path = path
        self._begin = begin
        self._retry = retry
        self._check = check
        self._future = begin()

    def cancel(self) -> None:
        """Give up; nobody waits for the result."""
        self._future.cancel()

    def settle(self) -> None:
        """Wait until the service has dealt with it, well or not; nobody wants the result."""
        wait((self._future,), self._retry.patience)
        self._future.cancel()

    def result(self) -> T:
        """Wait for the result.

        Raises:
            OSError: In place of any error of the service or of the way to it.
        """
        start = time.monotonic()
        while True:
            try:
                result = self._future.result(self._retry.patience)
                if self._check is not None:
                    self._check(result)
                return result
            except MemoryError:
                raise
            except Exception as error:
                self._future.cancel()
                if not self._is_to_be_tried_again(error, start):
                    raise as_os_error(error, self._path) from error
            except BaseException:  # an interrupt: whoever waited has gone
                self._future.cancel()
                raise
            self._future = self._begin()

    def _is_to_be_tried_again(self, error: Exception, start: float) -> bool:
        """Whether it is; says so, and waits."""
        if self.tries >= self._retry.tries or not is_transient(error):
            return False
        pause = self._retry.draw_pause(self.tries)
        if time.monotonic() + pause - start > self._retry.patience:
            return False
        self.tries += 1
        _LOG.warning(
            "%s %r: %s (%s); trying again in %.1f s (%d of %d)",
            self._what,
            self._path,
            _text_of(error),
            type(error).__name__,
            pause,
            self.tries,
            self._retry.tries,
        )
        time.sleep(pause)
        return True


def done(act: Callable[[], T]) -> Future[T]:
    """Do something now, and give it the looks of what is done elsewhere."""
    future: Future[T] = Future()
    try:
        future.set_result(act())
    except Exception as error:
        future.set_exception(error)
    return future


def is_transient(error: BaseException) -> bool:
    """Whether the same request may well succeed in a while: the service is busy, or the way to it broken.

    Not so where something is missing, forbidden, or asked in a wrong way: that stays as it is.
    """
    if isinstance(error, _PERMANENT):
        return False
    for each in _causes(error):
        status, code = _answer(each)
        if status is not None:
            return status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
        names = _names(each)
        if names & _PERMANENT_NAMES:
            return False
        if isinstance(each, (ConnectionError, TimeoutError)) or names & _TRANSIENT_NAMES:
            return True
        if isinstance(each, OSError) and each.errno in _TRANSIENT_ERRNO:
            return True
    return False


def as_os_error(error: Exception, path: str) -> OSError:
    """The same error as an `OSError` whose number tells the kind.

    Never EIO, by which a disk says that bytes are lost: a service that fails has lost nothing.
    """
    code = _errno_of(error)
    text = _text_of(error)
    # "No such file" in place of a bare name, which is all that some clients say.
    return OSError(code, os.strerror(code) if text in path else text, path)


def _errno_of(error: Exception) -> int:
    for kind, code in _ERRNO_OF_CLASS:
        if isinstance(error, kind):
            return code
    if isinstance(error, OSError) and error.errno and error.errno not in (errno.EIO, _EREMOTEIO):
        return error.errno
    for each in _causes(error):
        status, _ = _answer(each)
        if status is not None:
            return _ERRNO_OF_STATUS.get(status, errno.EBUSY if status >= 429 else errno.EPROTO)
        names = _names(each)
        if names & _NO_CREDENTIALS:
            return errno.EACCES
        if any("Timeout" in name for name in names):
            return errno.ETIMEDOUT
        if names & _TRANSIENT_NAMES:
            return errno.ECONNRESET
    return errno.EPROTO


# By which s3fs tells a status of 500; not every system has the number.
_EREMOTEIO = getattr(errno, "EREMOTEIO", errno.EIO)


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
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status, str(response.get("Error", {}).get("Code", ""))
    for holder in (error, response):  # azure and aiohttp, gcsfs, requests
        for name in ("status", "status_code", "code"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return int(status), ""
    return None, ""


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _text_of(error: BaseException) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return str(strerror or error).strip() or type(error).__name__
