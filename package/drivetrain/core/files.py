"""Open and read small files that the library did not just write itself.

A path in a run directory, or one that a user gives, may lead to something that is no file. Opening a pipe
waits for its other end, and reading a device never ends. Everything outside `drivetrain.checkpoint`, which
has its own verified files, opens files here.

Nothing is written through a symbolic link, which would lead out of the directory that the user has given,
and no file is replaced that drivetrain has not written: see `check_own`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import IO, Any

from drivetrain.core.errors import ConfigError

LARGEST = 64 << 20
"""The largest file that is read whole, and the longest line, in bytes, unless a caller allows more."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_REASONS = {
    errno.EISDIR: "is a directory",
    errno.ENXIO: "is a pipe or a socket",
    errno.ENOTDIR: "is inside a file, not inside a directory",
    errno.ELOOP: "is a symbolic link that leads to no file",
    errno.ENAMETOOLONG: "has a name that is longer than the system allows",
}

_TO_NOTHING = "is a symbolic link to nothing"

_WRITTEN_THROUGH = "is a symbolic link, and files are not written through links"

_IMPOSSIBLE = "has a character that no path can have"


class NotAFileError(ConfigError, OSError):
    """A path that leads to no regular file, or to one that is too large or not drivetrain's."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self._given = shown, _ = os.fspath(path), reason
        shown = shown if len(shown) <= 400 else f"{shown[:200]}...{shown[-100:]}"
        super().__init__(f"{shown!r} {reason}. Remove what is there, or give another path")

    def __reduce__(self) -> tuple[type[NotAFileError], tuple[str, str]]:
        """Pickle by the constructor's arguments, as an `OSError` that is a `ValueError` too must."""
        return type(self), self._given


def descriptor_of_file(path: str, flags: int) -> int:
    """Open a regular file, as `os.open` does; for the argument `opener` of `open`.

    Raises:
        NotAFileError: The path leads to something else, or is a symbolic link that would be written through.
        OSError: The file cannot be opened.
    """
    # A pipe without another end would be waited for; a regular file ignores the flag.
    flags |= getattr(os, "O_NONBLOCK", 0)
    if flags & (os.O_WRONLY | os.O_RDWR):
        if os.path.islink(path):
            raise NotAFileError(path, _WRITTEN_THROUGH)
        flags |= getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise NotAFileError(path, f"is {_name_of(mode)}")


def odd_kind(path: str | os.PathLike[str]) -> str | None:
    """Return a phrase such as "is a pipe" for a path that leads to something odd.

    Returns:
        None for a file, a directory, or a path that leads nowhere yet.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _TO_NOTHING if os.path.islink(path) else None
    except OSError as error:
        return _REASONS[errno.ELOOP] if error.errno == errno.ELOOP else None
    except ValueError:  # a null byte, or a lone surrogate
        return _IMPOSSIBLE
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return f"is {_name_of(mode)}"


def _name_of(mode: int) -> str:
    return next((name for test, name in _KINDS if test(mode)), "no file")


def open_file(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """Open a regular file as `open` does, and never wait for it.

    Raises:
        NotAFileError: The path leads to something else, or cannot be the path of a file.
        OSError: There is no such file, or it cannot be opened.
    """
    try:
        opened: IO[Any] = open(path, mode, opener=descriptor_of_file, **options)  # noqa: SIM115
    except NotAFileError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0)
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            reason = _TO_NOTHING
        if reason is None:
            raise
        raise NotAFileError(path, reason) from error
    except ValueError as error:  # a null byte, or a lone surrogate
        raise NotAFileError(path, _IMPOSSIBLE) from error
    return opened


def check_path(path: str | os.PathLike[str]) -> None:
    """Check that a path can be the path of a file or directory here, whether or not there is one.

    Raises:
        NotAFileError: It cannot: a part is too long or leads round in a circle, or it has a null byte.
    """
    try:
        os.lstat(path)
    except ValueError as error:  # a null byte, or a lone surrogate
        raise NotAFileError(path, _IMPOSSIBLE) from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise NotAFileError(path, _REASONS[error.errno]) from error


def check_own(path: str | os.PathLike[str], is_own: Callable[[bytes], object]) -> None:
    """Check that a file may be written: there is none, an empty one, or an earlier one of drivetrain.

    Args:
        path: The path of the file.
        is_own: Returns from the content of a file whether drivetrain has written it; a `ValueError` says no.

    Raises:
        NotAFileError: Somebody else has written the file, or the path leads to something else.
        OSError: The file cannot be read.
    """
    if os.path.islink(path):
        raise NotAFileError(path, _WRITTEN_THROUGH)
    try:
        content = read_file(path)
        if not content or is_own(content):
            return
    except FileNotFoundError:
        return
    except ValueError as error:
        if isinstance(error, NotAFileError):
            raise
    raise NotAFileError(path, "is a file that drivetrain has not written, and stays as it is")


def make_directory(path: str | os.PathLike[str]) -> None:
    """Make a directory, and those above it, unless it exists.

    Raises:
        NotAFileError: The path leads to something else, or cannot be the path of a directory.
        OSError: It cannot be made.
    """
    check_path(path)
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotAFileError(path, "is no directory, or is inside something that is none") from error


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Return the content of a regular file.

    Raises:
        NotAFileError: The path leads to something else, or to a file of more than `most` bytes.
        OSError: The file cannot be read.
    """
    with open_file(path, "rb") as file:
        content: bytes = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else bytes(most + 1)
    if len(content) > most:
        raise NotAFileError(path, f"has more than the {most} bytes that are allowed")
    return content


def read_text(path: str | os.PathLike[str], most: int = LARGEST) -> str:
    """Return the text of a regular file in UTF-8.

    Raises:
        NotAFileError: As `read_file`.
        OSError: The file cannot be read.
        UnicodeDecodeError: It is not UTF-8; a `ValueError`.
    """
    return read_file(path, most).decode("utf-8")


def read_json(path: str | os.PathLike[str], **hooks: Any) -> Any:
    """Return the value in a regular file of JSON.

    Raises:
        NotAFileError: As `read_file`.
        OSError: The file cannot be read.
        ValueError: It is not JSON, or nested too deeply.
    """
    return loads(read_text(path), **hooks)


def loads(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON as `json.loads` does; a text that is nested too deeply is a `ValueError` too."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lines_of(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their ends; the last may lack its end.

    Raises:
        NotAFileError: The path leads to something else, or a line has more than `LARGEST` bytes.
        OSError: The file cannot be read.
    """
    with open_file(path, "rb") as file:
        while line := file.readline(LARGEST + 1):
            if len(line) > LARGEST:
                raise NotAFileError(path, f"has a line of more than {LARGEST} bytes")
            yield line
