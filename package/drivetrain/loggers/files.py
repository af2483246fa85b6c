"""What the loggers that write plain text files share."""

from __future__ import annotations

import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drivetrain.types import Json


def to_json(value: Any) -> Json:
    """`value` as strict JSON; what JSON does not know becomes its text.

    JSON has no word for the non-finite numbers, and Python's own ``NaN`` breaks every strict reader. They
    become the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` takes back.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _name(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(each) for each in value]
    return str(value)


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have the system's errors name the file that they are about; that of a write, on a full disk, does not.

    Raises:
        OSError: As it was, with the file's name.
    """
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def replace_text(path: Path, text: str) -> None:
    """Put `text` into `path` so that a reader, or a kill, sees the old content or the new, never a part.

    Raises:
        OSError: It could not be written; the old content stays, and nothing else.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with naming(path):
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Write `config` to ``config.json`` in `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_text(directory / "config.json", json.dumps(to_json(config), indent=2, allow_nan=False) + "\n")


def set_aside(path: Path) -> None:
    """Rename a file of an earlier run: ``metrics.csv`` becomes ``metrics.1.csv``, or the next free number."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


class Appended:
    """A file to whose end whole pieces are written: a piece for which there is no room is not there at all.

    Without that, half a row, or half an event, would spoil all that is written after it once there is room.

    Args:
        path: The file; made, with its directory, if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._piece = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return os.fstat(self._file.fileno()).st_size == 0

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted, so that what is written goes nowhere; Windows does not allow that."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def write(self, data: bytes) -> int:
        """Add to the piece that `flush` writes."""
        self._piece += data
        return len(data)

    def flush(self) -> None:
        """Write the piece.

        Raises:
            OSError: It could not be written, and is dropped.
        """
        piece, self._piece = memoryview(self._piece), bytearray()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while piece:
                piece = piece[self._file.write(piece) :]
        except OSError as error:
            error.filename = str(self._path)  # as `naming`, which would be called with every piece
            os.ftruncate(self._file.fileno(), before)
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class FileLogger(ABC):
    """A logger that appends to one text file.

    The first line that a new logger writes begins a new file; one that stands there already, from an earlier
    run, is set aside. After `load_state_dict` the logger goes on in the file instead, without what was
    written after the state was taken.

    Args:
        path: The file; made, with its directory, at the first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._continues = False
        self._file: Appended | None = None
        self._config: Mapping[str, Any] | None = None
        self._owes_config = False

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line; `step` is the number of updates made."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """How far the file goes."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: cut what the file gained since. A missing or shorter file is taken as it is.

        Raises:
            OSError: It could not be cut; the logger goes on at its end.
        """

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json`` beside the file."""
        self._config = config
        write_config(self.path.parent, config)

    def close(self) -> None:
        """Close the file; logging again reopens it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Appended:
        """The file; made anew if it was deleted meanwhile, with ``config.json`` if that was too."""
        if self._file is not None and not self._file.is_gone:
            return self._file
        if self._file is not None:
            warnings.warn(f"{self.path} was deleted while it was written to; it begins anew", stacklevel=3)
            self._owes_config = True
        self.close()
        if self._owes_config and self._config is not None:
            if not (self.path.parent / "config.json").exists():
                write_config(self.path.parent, self._config)
            self._owes_config = False
        if not self._continues:
            set_aside(self.path)
            self._continues = True
        self._file = Appended(self.path)
        return self._file
