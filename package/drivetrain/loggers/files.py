"""Files for the loggers that write plain text."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.checkpoint.storage.files import replacing
from drivetrain.core.errors import without_secrets
from drivetrain.core.files import NotAFileError, check_own, loads, make_directory, open_file
from drivetrain.core.types import Json


def to_json(value: Any) -> Json:
    """Convert `value` to strict JSON, without the secrets of addresses; another object becomes its text.

    JSON has no non-finite numbers, and Python's own ``NaN`` breaks every strict reader. They become the
    strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` accepts.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return without_secrets(str(value))


def flat(value: Json, name: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Yield the values of a tree with dotted names, without None; lists as texts."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, json.dumps(value) if isinstance(value, list) else value


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Run the block so that an OSError names the file. A write to a full disk raises one without a name.

    Raises:
        OSError: The block's, with the file's name.
    """
    try:
        yield
    except NotAFileError:  # which has it in its message
        raise
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` so that a reader, or a kill, leaves the old content or the new.

    Raises:
        OSError: The text could not be written; only the old content is there.
    """
    if path.is_dir():
        raise NotAFileError(path, "is a directory")
    with naming(path), replacing(str(path)) as temporary:
        Path(temporary).write_text(text, encoding="utf-8", newline="")


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config` to ``config.json`` in `directory`, which is made if necessary.

    Raises:
        NotAFileError: There is one that drivetrain has not written.
        OSError: It could not be written.
    """
    made, path = to_json(config), directory / "config.json"
    assert isinstance(made, dict)
    make_directory(directory)
    # A fit's has drivetrain's version; what a program gives a logger has the same names at its next start.
    check_own(path, lambda before: b'"drivetrain": "' in before or loads(before).keys() == made.keys())
    replace_text(path, json.dumps(made, indent=2, allow_nan=False) + "\n")


def with_epoch(metrics: Mapping[str, float], run: Any) -> dict[str, float]:
    """Return the values of a log point, in training with "epoch", the full passes over the data."""
    epoch = {} if run is None or run.train_feed is None else {"epoch": float(run.progress.epoch)}
    return epoch | {name: float(value) for name, value in metrics.items()}


def set_aside(path: Path) -> None:
    """Rename an earlier run's file: ``metrics.csv`` becomes ``metrics.1.csv``, or the next free number."""
    if not os.path.lexists(path):
        return
    numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    path.rename(next(each for each in numbered if not os.path.lexists(each)))


class Appended:
    """A file that grows by whole pieces: a piece that does not fit on the disk is not written at all.

    Otherwise half a row, or half an event, would spoil everything that is written after it.

    Args:
        path: The file; made, with its directory, if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        make_directory(path.parent)
        self._path = path
        self._file = open_file(path, "ab", buffering=0)
        self._piece = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether the file is empty."""
        return os.fstat(self._file.fileno()).st_size == 0

    def ends_with(self, data: bytes) -> bool:
        """Return whether these are the last bytes in the file: another program may have changed it."""
        size = os.fstat(self._file.fileno()).st_size
        with open_file(self._path, "rb") as file:
            file.seek(max(0, size - len(data)))
            return bool(file.read() == data)

    def write(self, data: bytes) -> int:
        """Add to the piece that `flush` writes."""
        self._piece += data
        return len(data)

    def flush(self, over: bytes = b"") -> None:
        """Write the buffered piece.

        Args:
            over: The end of the file, which the piece replaces.

        Raises:
            OSError: The piece could not be written, and is dropped.
        """
        piece, self._piece = memoryview(self._piece), bytearray()
        before = os.fstat(self._file.fileno()).st_size
        if over:
            before -= len(over)
            os.ftruncate(self._file.fileno(), before)
        try:
            while piece:
                piece = piece[self._file.write(piece) :]
        except OSError as error:
            error.filename = str(self._path)  # as `naming` does, without a call for every piece
            os.ftruncate(self._file.fileno(), before)
            if over:
                with suppress(OSError):  # there was room for it a moment ago
                    self._file.write(over)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class FileLogger(ABC):
    """A logger that appends to one text file.

    The first line of a new logger begins a new file; an earlier run's file is renamed. After
    `load_state_dict` the logger appends to the file instead, without the lines that were written after the
    state was taken.

    Args:
        path: The file; made, with its directory, at the first write.
    """

    _begins: ClassVar[bytes]
    """The first bytes of every such file: one that begins otherwise is somebody else's, and stays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._continues = False
        self._file: Appended | None = None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line; `step` is the number of steps made."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return how far the file goes."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state` without the lines added since; a missing or shorter file is kept.

        Raises:
            OSError: The file could not be truncated; the logger appends at its end.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json`` beside the file.

        Raises:
            NotAFileError: This file, or the logger's own, is there and is not drivetrain's.
        """
        self._is_there()
        write_config(self.path.parent, config)

    def close(self) -> None:
        """Close the file; logging again reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Appended:
        if self._file is None:
            if not self._continues and self._is_there():
                set_aside(self.path)
            self._continues = True
            self._file = Appended(self.path)
        return self._file

    def _is_there(self) -> bool:
        """Return whether there is a file already, after a check that it is of an earlier run.

        Raises:
            NotAFileError: It is somebody else's.
        """
        if not os.path.lexists(self.path):
            return False
        with open_file(self.path, "r+b") as file:
            if not self._begins.startswith(begin := file.read(len(self._begins))):
                raise NotAFileError(
                    self.path, f"begins with {begin!r}, so it is no earlier file of drivetrain"
                )
        return True
