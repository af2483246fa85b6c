"""A storage service as fsspec gives access to it (https://filesystem-spec.readthedocs.io), with retries."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from drivetrain.checkpoint.retries import Request, Retry, done
from drivetrain.errors import CheckpointError, MissingDependencyError, nearest

_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3")}
"""Protocols that an extra of ours is for: the package, and the extra that brings it."""


class Client:
    """One service, in one process.

    Args:
        fs: The fsspec file system. It keeps no listings.
        retry: When a request is made again.

    Attributes:
        fs: As given.
        overlaps: Whether several requests can be under way at a time.
    """

    def __init__(self, fs: Any, retry: Retry) -> None:
        self.fs = fs
        self.overlaps = bool(fs.async_impl)
        self._retry = retry

    def strip(self, path: str) -> str:
        """The path as fsspec knows it, without its scheme."""
        return str(self.fs._strip_protocol(path))

    def begin(
        self,
        what: str,
        path: str,
        method: str,
        *arguments: Any,
        check: Callable[[Any], None] | None = None,
        body: bytes | None = None,
        **named: Any,
    ) -> Request[Any]:
        """Make a request, and wait for nothing if that can be.

        Args:
            what: What is being done, as "reading"; for messages.
            path: To what; for messages.
            method: Of the fsspec file system.
            *arguments: The method's.
            check: As in `Request`.
            body: What is given to the method as `Body`, as a file, from the start for each try.
            **named: The method's.
        """

        def send() -> Future[Any]:
            if body is not None:
                # aiohttp sends a file piece by piece, and bytes at one go, which stops everything else.
                named["Body"] = io.BytesIO(body)
            if not self.overlaps:
                return done(lambda: getattr(self.fs, method)(*arguments, **named))
            # fsspec's asynchronous file systems have, for every method, a coroutine with an underscore.
            return asyncio.run_coroutine_threadsafe(
                getattr(self.fs, f"_{method}")(*arguments, **named), self.fs.loop
            )

        return Request(what, path, send, self._retry, check)

    def call(self, what: str, path: str, method: str, *arguments: Any, **named: Any) -> Any:
        """Make a request and wait for its result; see `begin`.

        Raises:
            OSError: In place of any error of the service or of the way to it.
        """
        return self.begin(what, path, method, *arguments, **named).result()

    def info(self, path: str) -> Mapping[str, Any]:
        """What the service says of an object or a prefix: its "type", and its "size" in bytes.

        Raises:
            FileNotFoundError: Nothing is there.
            OSError: It could not be asked.
        """
        found: Mapping[str, Any] = self.call("looking at", path, "info", self.strip(path))
        return found


def implementation(protocol: str) -> Any:
    """The class of fsspec's file systems for a protocol, such as "s3".

    Raises:
        MissingDependencyError: fsspec, or the package for Amazon S3, is not installed.
        CheckpointError: No such protocol, or its package is not installed.
    """
    purpose = f"an address that begins with '{protocol}://'"
    package, extra = _EXTRAS.get(protocol, ("fsspec", "remote"))
    try:
        from fsspec import available_protocols, get_filesystem_class
    except ImportError as error:
        raise MissingDependencyError(package, extra, purpose) from error
    try:
        return get_filesystem_class(protocol)
    except ValueError as error:
        raise CheckpointError(
            f"unknown kind of address '{protocol}://'. {nearest(protocol, available_protocols())}"
        ) from error
    except ImportError as error:
        if protocol in _EXTRAS:
            raise MissingDependencyError(package, extra, purpose) from error
        raise CheckpointError(f"{purpose} needs a package that is not installed: {error}") from error


def connect(kind: Any, options: Mapping[str, Any]) -> Any:
    """A new fsspec file system: no other's, and none that remembers what was in a directory.

    Args:
        kind: The class; see `implementation`.
        options: Of the file system; what is not among them is as fsspec's own configuration says.
    """
    from fsspec.config import apply_config

    settings = apply_config(kind, dict(options))
    settings.update(use_listings_cache=False, skip_instance_cache=True)
    if not speaks_s3(kind):
        return kind(**settings)
    # One try each time: the client's own would multiply with ours, unseen, and outlast any limit.
    settings["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **settings.get("config_kwargs", {})}
    fs = kind(**settings)
    fs.retries = 1
    return fs


def speaks_s3(fs: Any) -> bool:
    """Whether a file system, or a class of them, makes requests of Amazon S3 by their own names."""
    return hasattr(fs, "call_s3")


def configuration(kind: Any) -> str:
    """What fsspec's own configuration says about a class of file systems now: another text if it changed."""
    from fsspec.config import conf

    names = (kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol
    return repr([conf.get(name) for name in names])
