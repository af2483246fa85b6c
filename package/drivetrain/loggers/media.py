"""The values that a run can log beside numbers, such as images, figures, tables and sound."""

from __future__ import annotations

import copy
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.core.files import read_file
from drivetrain.core.types import Logger
from drivetrain.core.validation import count, number
from drivetrain.loggers.files import to_json

Array: TypeAlias = Any
"""A tensor on any device, or what NumPy makes an array of."""

Kind: TypeAlias = Literal[
    "audio", "figure", "file", "histogram", "image", "plotly figure", "table", "text", "video"
]
"""The kinds of values; a logger names those that it takes."""

_LARGEST_FILE = 1 << 32

HOW_TO_LOG = (
    "Write Text(...), Image(...), Histogram(...), Figure(...), Table(...) or File(...), or log each of its"
    " numbers under a name of its own"
)
"""Advice for an object that is not a number."""


class Media(ABC):
    """The base of the values that `run.log` takes beside numbers.

    A tensor stays on its device until `data` is read, at a log point, if any logger takes the value.

    Attributes:
        kind: The kind.
        suffix: The end of the name of a file with this content.
        problem: What a reader should know about the content, such as that numbers were clipped; known once
            `data` has been read.
    """

    kind: Kind
    suffix: str

    def __init__(self, source: Any) -> None:
        if hasattr(source, "full_tensor"):
            raise ConfigError(
                f"{type(self).__name__} was given a sharded tensor. Give run.full_tensor(tensor), on all"
                " ranks"
            )
        self._source = source
        self._data: bytes | None = None
        self.problem = ""

    @property
    def data(self) -> bytes:
        """The content, as the bytes of a file."""
        if self._data is None:
            self._data, self._source = self._encode(self._source), None
        return self._data

    @abstractmethod
    def _encode(self, source: Any) -> bytes: ...

    def to_host(self) -> None:
        """Copy to the host what is still on a device, and release the rest."""
        _ = self.data

    def snapshot(self) -> Media:
        """Return a copy that does not change when a tensor changes later; it stays on the device."""
        kept = copy.copy(self)
        if isinstance(self._source, Tensor):
            kept._source = self._source.detach().clone()
        return kept


@runtime_checkable
class MediaLogger(Logger, Protocol):
    """A logger that takes values beside numbers.

    Attributes:
        takes: The kinds that it takes, such as {"image", "figure"}.
    """

    takes: Collection[Kind]

    def log_media(self, values: Mapping[str, Media], step: int) -> None:
        """Log values of these kinds at a step."""
        ...


@dataclass(frozen=True, slots=True)
class BinCounts:
    """How often values of each size occur.

    Attributes:
        edges: The edges of the bins, ascending; one more than there are bins. The last bin includes its end.
        counts: The number of values in each bin.
        minimum: The smallest value.
        maximum: The largest value.
        sum: The sum of the values.
        sum_of_squares: The sum of their squares.
        nonfinite: How many values are NaN or infinite; nothing above counts them.
    """

    edges: Sequence[float]
    counts: Sequence[int]
    minimum: float
    maximum: float
    sum: float
    sum_of_squares: float
    nonfinite: int = 0


@final
class Histogram(Media):
    """A histogram of numbers.

    Args:
        values: The numbers, of any shape; or a `BinCounts`, if they are counted already.
        bins: The number of equally wide bins.

    Raises:
        ConfigError: `bins` is no positive whole number.
    """

    kind = "histogram"
    suffix = ".json"

    def __init__(self, values: Array | BinCounts, bins: int = 64) -> None:
        super().__init__(values)
        self._bins = count("Histogram(bins=)", bins, at_least=1)
        self._counts = values if isinstance(values, BinCounts) else None

    @property
    def counts(self) -> BinCounts:
        """How often values of each size occur."""
        if self._counts is None:
            self._counts, self._source = _counted(_array(self._source), self._bins), None
        return self._counts

    def to_host(self) -> None:
        """Count the values."""
        _ = self.counts

    def _encode(self, source: Any) -> bytes:
        return json.dumps(to_json(asdict(self.counts)), allow_nan=False).encode()


@final
class Image(Media):
    """A picture, stored as PNG.

    Args:
        pixels: A tensor of shape [channels, height, width], an array of shape [height, width, channels],
            either of shape [height, width], or a picture of Pillow. 1 channel is grey, 3 are RGB, 4 are RGBA.
            Floats are from 0 to 1, whole numbers from 0 to 255; others are clipped, with a warning.
        layout: "CHW" or "HWC", if it is not as above.

    Raises:
        ConfigError: Another shape, such as that of a batch.
    """

    kind = "image"
    suffix = ".png"

    def __init__(self, pixels: Array, *, layout: Literal["CHW", "HWC"] | None = None) -> None:
        if callable(getattr(pixels, "convert", None)):  # of Pillow
            pixels = np.asarray(pixels.convert("RGBA" if "A" in pixels.getbands() else "RGB"))
        self._layout = _layout(pixels, layout, "Image")
        shape = _shape(pixels, "Image")
        colours = shape if self._layout == "CHW" else shape[::-1]
        if len(shape) not in (2, 3) or 0 in shape or (len(shape) == 3 and colours[0] not in (1, 3, 4)):
            raise ConfigError(
                f"Image takes one picture of shape {_SHAPES[self._layout]} with 1, 3 or 4 channels, or"
                f" [height, width], not {list(shape)}. Give layout='HWC' or 'CHW' for another order; of a"
                " batch give one picture at a time, or a grid, such as torchvision.utils.make_grid(batch)"
            )
        super().__init__(pixels)

    def _encode(self, source: Any) -> bytes:
        pixels, self.problem = _as_bytes(_array(source))
        file = io.BytesIO()
        _pictures([_channels_last(pixels, self._layout)])[0].save(file, format="PNG")
        return file.getvalue()


@final
class Figure(Media):
    """A figure of matplotlib, stored as PNG, or of plotly, stored as HTML.

    It is drawn at the log point, so do not clear it before.

    Args:
        figure: The figure.

    Raises:
        ConfigError: It is something else, such as axes.
    """

    def __init__(self, figure: Any) -> None:
        is_plotly = callable(getattr(figure, "to_plotly_json", None))
        if not is_plotly and not callable(getattr(figure, "savefig", None)):
            axes = " Of axes give their figure: axes.figure" if hasattr(figure, "figure") else ""
            raise ConfigError(
                f"Figure takes one of matplotlib or plotly, not a {type(figure).__name__}.{axes}"
            )
        super().__init__(figure)
        self.kind = "plotly figure" if is_plotly else "figure"
        self.suffix = ".html" if is_plotly else ".png"

    def _encode(self, source: Any) -> bytes:
        if self.kind == "plotly figure":
            return str(source.to_html(include_plotlyjs="cdn")).encode()
        file = io.BytesIO()
        source.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()


@final
class Text(Media):
    """A text, which trackers show as Markdown.

    Args:
        text: The text.

    Attributes:
        text: The same.

    Raises:
        ConfigError: It is no text.
    """

    kind = "text"
    suffix = ".md"

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"Text takes a text, not a {type(text).__name__}")
        super().__init__(text)
        self.text = text

    def _encode(self, source: Any) -> bytes:
        return self.text.encode()


@final
class Table(Media):
    """A table.

    Args:
        columns: The names of the columns.
        rows: The rows: a cell for each column, a number, a text or None; other objects become texts.

    Attributes:
        columns: The names.
        rows: The rows.

    Raises:
        ConfigError: A row has another number of cells.
    """

    kind = "table"
    suffix = ".json"

    def __init__(self, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
        self.columns = [str(each) for each in columns]
        self.rows = [[_cell(each) for each in row] for row in rows]
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ConfigError(
                    f"Table: row {index} has {len(row)} cells, and there are {len(self.columns)} columns"
                    f" ({', '.join(self.columns)})"
                )
        super().__init__(None)

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        cells = ((str(each).replace("|", "\\|").replace("\n", " ") for each in line) for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)

    def _encode(self, source: Any) -> bytes:
        return json.dumps({"columns": self.columns, "data": self.rows}, allow_nan=False).encode()


@final
class Audio(Media):
    """Sound, stored as WAV of 16 bits.

    Args:
        samples: Sound of shape [samples] or [channels, samples], as in torchaudio: floats from -1 to 1, or
            whole numbers of 16 bits. Other floats are clipped, with a warning.
        sample_rate: Samples per second.

    Attributes:
        sample_rate: The same.
        channels: The number of channels.
        length: The number of samples of a channel.

    Raises:
        ConfigError: Another shape, or a rate that is no positive whole number.
    """

    kind = "audio"
    suffix = ".wav"

    def __init__(self, samples: Array, sample_rate: int) -> None:
        shape = _shape(samples, "Audio")
        if len(shape) not in (1, 2) or 0 in shape or (len(shape) == 2 and shape[0] > min(shape[1], 64)):
            raise ConfigError(f"Audio takes shape [samples] or [channels, samples], not {list(shape)}")
        super().__init__(samples)
        self.sample_rate = count("Audio(sample_rate=)", sample_rate, at_least=1)
        self.channels, self.length = (1, *shape)[-2:]

    def _encode(self, source: Any) -> bytes:
        import wave

        samples = _array(source).reshape(self.channels, self.length)
        if samples.dtype.kind == "f":
            self.problem = _outside(samples, -1.0, 1.0)
            samples = np.clip(np.nan_to_num(samples), -1.0, 1.0) * 32767
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((self.channels, 2, self.sample_rate, self.length, "NONE", "not compressed"))
            sound.writeframes(samples.astype("<i2").T.tobytes())
        return file.getvalue()


@final
class Video(Media):
    """A film, stored as an animated GIF.

    Args:
        frames: A tensor of shape [frames, channels, height, width], or an array of shape [frames, height,
            width, channels], with numbers as in `Image`.
        fps: Frames per second.
        layout: "CHW" or "HWC" for the frames, if it is not as above.

    Raises:
        ConfigError: Another shape, or a rate that is not above 0.
    """

    kind = "video"
    suffix = ".gif"

    def __init__(
        self, frames: Array, fps: float = 4.0, *, layout: Literal["CHW", "HWC"] | None = None
    ) -> None:
        self._layout = _layout(frames, layout, "Video")
        shape = _shape(frames, "Video")
        if len(shape) != 4 or 0 in shape or shape[1 if self._layout == "CHW" else 3] not in (1, 3, 4):
            raise ConfigError(
                f"Video takes frames of shape [frames, {_SHAPES[self._layout][1:]} with 1, 3 or 4 channels,"
                f" not {list(shape)}. Give layout='HWC' or 'CHW' for another order"
            )
        super().__init__(frames)
        self._fps = number("Video(fps=)", fps, above=0)

    def _encode(self, source: Any) -> bytes:
        pixels, self.problem = _as_bytes(_array(source))
        pictures = _pictures(_channels_last(each, self._layout) for each in pixels)
        file = io.BytesIO()
        options = {"save_all": True, "append_images": pictures[1:], "duration": 1000 / self._fps, "loop": 0}
        pictures[0].save(file, format="GIF", **options)
        return file.getvalue()


@final
class File(Media):
    """A file, which a tracker stores under the logged name.

    Args:
        path: The file, which is read at the log point.

    Attributes:
        path: Its absolute path.

    Raises:
        ConfigError: There is no such file.
    """

    kind = "file"

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if self.path.is_dir():
            raise ConfigError(f"File({str(path)!r}) is a folder: give one file, such as an archive of it")
        if not self.path.is_file():
            raise ConfigError(f"File({str(path)!r}): no such file. A folder can be given as an archive")
        super().__init__(None)
        self.suffix = self.path.suffix

    def _encode(self, source: Any) -> bytes:
        return read_file(self.path, _LARGEST_FILE)


_SHAPES: dict[str, str] = {"CHW": "[channels, height, width]", "HWC": "[height, width, channels]"}


def _shape(value: Any, what: str) -> tuple[int, ...]:
    shape = tuple(getattr(value, "shape", None) or np.shape(value))
    is_complex = (isinstance(value, Tensor) and value.is_complex()) or np.iscomplexobj(value)
    if value is None or isinstance(value, (str, bytes, Path)) or is_complex:
        given = "complex numbers" if is_complex else repr(value)
        raise ConfigError(
            f"{what} takes real numbers, in a tensor or an array, not {given}. Read a file first, or log it"
            " as it is: File(path)"
        )
    return shape


def _layout(value: Any, given: str | None, what: str) -> str:
    if given not in (None, "CHW", "HWC"):
        raise ConfigError(f"{what}(layout=) is 'CHW' or 'HWC', not {given!r}")
    return given or ("CHW" if isinstance(value, Tensor) else "HWC")


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().to_dense() if value.is_sparse else value.detach().cpu()
        value = value.float() if value.is_floating_point() and value.itemsize < 4 else value
    return np.asarray(value)


def _as_bytes(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], str]:
    """Return pixels as bytes, and what is wrong with their range."""
    if values.dtype == np.uint8:
        return values, ""
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * 255, ""
    most = 1.0 if values.dtype.kind == "f" else 255
    problem = _outside(values, 0, most)
    clipped = np.clip(np.nan_to_num(values), 0, most)
    return (clipped * (255 / most) + 0.5).astype(np.uint8), problem


def _outside(values: np.ndarray[Any, Any], low: float, high: float) -> str:
    least, largest = float(values.min()), float(values.max())
    if least >= low and largest <= high:  # false for NaN
        return ""
    return f"its numbers are from {least:.3g} to {largest:.3g} and were clipped to {low:g} to {high:g}"


def _channels_last(pixels: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    if pixels.ndim == 2:
        return pixels[..., None]
    return pixels.transpose(1, 2, 0) if layout == "CHW" else pixels


def _pictures(pixels: Iterable[np.ndarray[Any, Any]]) -> list[Any]:
    """Return pictures of Pillow of bytes of shape [height, width, channels]."""
    from PIL.Image import fromarray

    return [fromarray(each[..., 0] if each.shape[2] == 1 else each) for each in pixels]


def _counted(values: np.ndarray[Any, Any], bins: int) -> BinCounts:
    if values.dtype.kind not in "biuf":
        raise ConfigError(f"Histogram takes numbers that have an order, not {values.dtype}")
    wide = values.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    if not len(finite):
        return BinCounts([-0.5, 0.5], [0], 0.0, 0.0, 0.0, 0.0, len(wide))
    counts, edges = np.histogram(finite, bins)
    total, squares = float(finite.sum()), float(np.square(finite).sum())
    ends = float(finite.min()), float(finite.max())
    return BinCounts(edges.tolist(), counts.tolist(), *ends, total, squares, len(wide) - len(finite))


def _cell(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return str(value) if isinstance(value, (Mapping, list, tuple)) else to_json(value)
