"""How far a long reading has come, told on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from drivetrain.checkpoint.filesystem import FileSystem, Kind, Sink, Source
from drivetrain.cli.printing import columns, plain, sized

_EVERY = 0.2
"""Seconds between two lines."""


class Meter:
    """A line on standard error that tells the progress; nothing where that is no terminal.

    Args:
        total: How many bytes are to be read.
    """

    def __init__(self, total: int) -> None:
        self.title = ""
        self._total = max(total, 1)
        self._done = 0
        self._shown = 0.0
        self._visible = sys.stderr.isatty()

    def advance(self, count: int) -> None:
        """So many more bytes were read."""
        self._done += count
        now = time.monotonic()
        if not self._visible or now - self._shown < _EVERY:
            return
        self._shown = now
        share = min(self._done / self._total, 1.0)
        text = plain(f"{share:4.0%} of {sized(self._total)}: {self.title}")
        # Back to the start of the line, and its rest cleared.
        sys.stderr.write(f"\r{text[: columns() - 1]}\x1b[K")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._visible and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = 0.0


class WatchedFileSystem:
    """A file system that tells how many bytes are read.

    Args:
        inner: Does what is asked.
        advance: Is given the number of bytes of each reading.
    """

    def __init__(self, inner: FileSystem, advance: Callable[[int], None]) -> None:
        self.renames = inner.renames
        self._inner = inner
        self._advance = advance

    def absolute(self, path: str) -> str:
        """See `FileSystem.absolute`."""
        return self._inner.absolute(path)

    def join(self, directory: str, name: str) -> str:
        """See `FileSystem.join`."""
        return self._inner.join(directory, name)

    def split(self, path: str) -> tuple[str, str]:
        """See `FileSystem.split`."""
        return self._inner.split(path)

    def kind(self, path: str) -> Kind | None:
        """See `FileSystem.kind`."""
        return self._inner.kind(path)

    def entries(self, directory: str) -> dict[str, Kind]:
        """See `FileSystem.entries`."""
        return self._inner.entries(directory)

    def create(self, path: str) -> Sink:
        """See `FileSystem.create`."""
        return self._inner.create(path)

    def open(self, path: str) -> Source:
        """See `FileSystem.open`."""
        return _WatchedSource(self._inner.open(path), self._advance)

    def make_directory(self, path: str) -> None:
        """See `FileSystem.make_directory`."""
        self._inner.make_directory(path)

    def sync(self, directory: str) -> None:
        """See `FileSystem.sync`."""
        self._inner.sync(directory)

    def rename(self, old: str, new: str) -> None:
        """See `FileSystem.rename`."""
        self._inner.rename(old, new)

    def delete(self, path: str) -> None:
        """See `FileSystem.delete`."""
        self._inner.delete(path)


class _WatchedSource:
    def __init__(self, inner: Source, advance: Callable[[int], None]) -> None:
        self.size = inner.size
        self._inner = inner
        self._advance = advance

    def read_into(self, target: memoryview) -> int:
        count = self._inner.read_into(target)
        self._advance(count)
        return count

    def seek(self, position: int) -> None:
        self._inner.seek(position)

    def close(self) -> None:
        self._inner.close()
