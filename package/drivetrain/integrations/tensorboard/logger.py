"""Metrics as TensorBoard event files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.core.errors import ConfigError
from drivetrain.core.files import make_directory
from drivetrain.core.messages import logger
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.tensorboard.graph import check_graph, trace_graph
from drivetrain.loggers.files import Appended, flat, to_json, with_epoch
from drivetrain.loggers.media import Audio, BinCounts, Histogram, Kind, Media, Table, Text

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter
    from torch.utils.tensorboard import SummaryWriter

_LOG = logger(__name__)

_PATTERN = "events.out.tfevents.*"
_OWN = f"events.out.tfevents.{'[0-9]' * 10}.{'[0-9]' * 9}.*"


@by_name
class TensorBoardLogger:
    """Writes scalars, pictures and other values to an event file for TensorBoard, and the configuration as a
    text and for the tab HParams.

    The tab shows a row for each run, with its configuration and the last value of each of its metrics.

    All values of a log point go into one event, which is flushed when it is written.

    The first write of a new logger begins a new event file. An earlier run's files in the directory are moved
    to ``earlier-1``, which TensorBoard shows as a separate run. After `load_state_dict` these files stay, and
    TensorBoard hides the values that are newer than the state.

    Args:
        directory: The event file's directory; made at the first write. Default: the run directory.
        writer: A `SummaryWriter` of the program, instead of a directory. It gets everything and stays open;
            its directory's earlier files stay where they are. It is flushed at each log point.
        graph: Whether the tab Graphs shows the operations of the model's forward. The model is
            traced once, at the first log point of training, and is unchanged afterwards.

    Raises:
        ConfigError: Both a directory and a writer are given, or `writer` is no `SummaryWriter`. At the start
            of a fit: there is no run directory, or `graph` is True and the model is sharded over ranks.
    """

    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "histogram", "image", "table", "text", "video"}
    )

    # Why neither torch's SummaryWriter nor tensorboard's EventFileWriter, measured per scalar with 10 in a
    # log point: SummaryWriter.add_scalar, one event each, 24 us; EventFileWriter, one event for all, 5 us;
    # RecordWriter with a flush per event 3.3 us. The import takes 0.12 s for each of them. RecordWriter needs
    # no thread and no queue, so that nothing is lost in a kill and nothing is left running after close().

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        writer: SummaryWriter | None = None,
        graph: bool = False,
    ) -> None:
        if directory is not None and writer is not None:
            raise ConfigError(
                "TensorBoardLogger needs a directory, or a SummaryWriter with a directory of its own: give it"
                " directory= or writer=, and not both"
            )
        if writer is not None and (isinstance(writer, type) or not hasattr(writer, "file_writer")):
            raise ConfigError(
                f"TensorBoardLogger(writer={writer!r}) is no SummaryWriter: make one by"
                " torch.utils.tensorboard.SummaryWriter(log_dir)"
            )
        given = directory if writer is None else writer.log_dir
        self._directory = None if given is None else Path(given)
        self._given: Any = writer
        self._graph = graph
        self._has_graph = False
        self._run: Any = None
        self._step = -1
        self._config = ""
        self._written_config = ""
        self._continues = False
        self._hidden: int | None = None
        self._path: Path | None = None
        self._file: Appended | None = None
        self._writer: RecordWriter | None = None
        self._event: Any = None

    @property
    def directory(self) -> Path:
        """The event file's directory.

        Raises:
            ConfigError: None was given, and no fit with a run directory has begun.
        """
        found = self._directory or (None if self._run is None else self._run.run_dir)
        if found is None:
            raise ConfigError("TensorBoardLogger needs a directory: give it one, or the Trainer a run_dir")
        return Path(found)

    def begin(self, run: Any) -> None:
        """Get ready for a fit.

        Raises:
            ConfigError: There is no directory, or the model is sharded and its graph is asked for.
        """
        self._run = run
        _ = self.directory
        if self._graph:
            check_graph(run)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the scalars as one event, in training with "epoch"; `step` is the number of steps made."""
        self._write_config()
        if self._graph and not self._has_graph and self._run is not None and self._run.window is not None:
            self._write_graph(step)
        shown = with_epoch(metrics, self._run)
        values = [{"tag": name, "simple_value": value} for name, value in shown.items()]
        self._write(step=step, summary={"value": values})
        self._step = max(self._step, step)

    def log_media(self, values: Mapping[str, Media], step: int) -> None:
        """Write pictures, histograms and the like as one event; `step` is the number of steps made."""
        self._write_config()
        self._write(step=step, summary={"value": [{"tag": n, **_value(each)} for n, each in values.items()]})
        self._step = max(self._step, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Show `config` on TensorBoard's text page, unless it equals the resumed run's."""
        # Held back until the first metrics: only then is it known whether the run resumes.
        self._config = json.dumps(to_json(config), indent=2, allow_nan=False)

    def close(self) -> None:
        """Write a configuration that is still held back and close the file; logging again reopens it."""
        self._write_config()
        self._close_file()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step logged, -1 before the first, and what else is written already."""
        return {"step": self._step, "config": self._written_config, "graph": self._has_graph}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, and hide the directory's values from later steps.

        Raises:
            OSError: The event that hides superseded ones could not be written; the next write tries again.
        """
        self._close_file()
        self._step = int(state["step"])
        self._written_config = str(state["config"])
        self._has_graph = bool(state.get("graph", False))  # checkpoints from before 0.1 have none
        self._continues = True
        self._path = None
        if any(self.directory.glob(_PATTERN)):
            self._hidden = self._step + 1
            self._hide()
            self._close_file()  # a run that fails before it starts would not close it

    def _hide(self) -> None:
        hidden, self._hidden = self._hidden, None
        try:
            # At a session's start TensorBoard drops what it has read so far from this step on.
            self._write(step=hidden, session_log={"status": "START"})
        except OSError:
            self._hidden = hidden
            raise

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = self._file = None

    def _write_config(self) -> None:
        if self._config in ("", self._written_config):
            return
        # Markdown shows lines that are indented by four spaces verbatim.
        text = "".join(f"    {line}\n" for line in self._config.splitlines())
        value = {"tag": "config/text_summary", **_text_value(text)}
        shown = {name: each for name, each in json.loads(self._config).items() if name != "run"}
        hparams = _hparams_value(shown)  # without the machine and the like, by which no runs are compared
        self._write(step=max(self._step, 0), summary={"value": [value, hparams]})
        self._written_config = self._config

    def _write_graph(self, step: int) -> None:
        self._has_graph = True  # also where it fails, so that there is one warning
        try:
            graph = trace_graph(self._run)
        except Exception as error:
            why = str(error).strip().partition("\n")[0] or type(error).__name__
            _LOG.warning(f"TensorBoard has no graph, because torch cannot trace the model: {why}")
            return
        self._write(step=step, graph_def=graph)

    def _write(self, **event: Any) -> None:
        if self._hidden is not None:
            self._hide()
        if self._given is not None:
            from tensorboard.compat.proto.event_pb2 import Event

            if self._given.file_writer is None:
                raise ConfigError(
                    "the SummaryWriter of TensorBoardLogger(writer=...) is closed: leave it open"
                )
            self._given.file_writer.add_event(Event(**event), event.get("step"))
            self._given.flush()
            return
        writer = self._writer or self._open()
        writer.write(self._event(wall_time=time.time(), **event).SerializeToString())
        writer.flush()

    def _open(self) -> RecordWriter:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        make_directory(self.directory)
        if not self._continues:
            _set_aside(self.directory)
            self._continues = True
        self._event = Event
        path = self._path
        if path is None:
            # TensorBoard reads a directory's files in the order of their names. So the time comes first, fine
            # enough that a quick restart's file follows the previous one.
            seconds, fraction = divmod(time.time_ns(), 1_000_000_000)
            name = f"events.out.tfevents.{seconds:010d}.{fraction:09d}.{socket.gethostname()}.{os.getpid()}"
            path = self.directory / name
        file = Appended(path)
        writer = RecordWriter(file)
        if self._path is None:
            # Version 2: restarts are marked by session logs and not guessed from the order of steps.
            first = Event(wall_time=time.time(), file_version="brain.Event:2")
            writer.write(first.SerializeToString())
            try:
                writer.flush()
            except OSError:
                file.close()
                path.unlink(missing_ok=True)
                raise
        self._path, self._file, self._writer = path, file, writer
        return writer


def _value(value: Media) -> dict[str, Any]:
    """Return the part of an event that shows a value."""
    if isinstance(value, Histogram):
        return {"histo": _histogram_value(value.counts)}
    if isinstance(value, (Text, Table)):
        return _text_value(value.text if isinstance(value, Text) else value.markdown())
    data = value.data
    if isinstance(value, Audio):
        sound: dict[str, Any] = {"sample_rate": value.sample_rate, "num_channels": value.channels}
        sound |= {"length_frames": value.length, "content_type": "audio/wav"}
        return {"audio": {**sound, "encoded_audio_string": data}}
    # The sizes are in the headers of PNG and GIF.
    width, height = (
        struct.unpack_from("<HH", data, 6) if data[:3] == b"GIF" else struct.unpack_from(">II", data, 16)
    )
    return {"image": {"width": width, "height": height, "colorspace": 4, "encoded_image_string": data}}


def _text_value(text: str) -> dict[str, Any]:
    content = {"string_val": [text.encode()], "tensor_shape": {"dim": [{"size": 1}]}}
    return {"metadata": {"plugin_data": {"plugin_name": "text"}}, "tensor": {"dtype": "DT_STRING", **content}}


def _histogram_value(histogram: BinCounts) -> dict[str, Any]:
    """Return the value of an event that shows a histogram, as `SummaryWriter.add_histogram` of torch does."""
    return {
        "min": histogram.minimum,
        "max": histogram.maximum,
        "num": sum(histogram.counts),
        "sum": histogram.sum,
        "sum_squares": histogram.sum_of_squares,
        # TensorBoard knows the right edge of each bucket. So an empty one comes first, for the left edge.
        "bucket_limit": list(histogram.edges),
        "bucket": [0, *histogram.counts],
    }


def _hparams_value(config: Json) -> dict[str, Any]:
    """Return the value of an event that shows a configuration on the tab HParams."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    values = dict(flat(config))
    data = HParamsPluginData()
    info = data.session_start_info
    info.start_time_secs = time.time()
    # Runs of one group are shown as one row.
    info.group_name = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    for name, each in values.items():
        if isinstance(each, bool):
            info.hparams[name].bool_value = each
        elif isinstance(each, str):
            info.hparams[name].string_value = each
        else:
            info.hparams[name].number_value = each
    return {
        "tag": "_hparams_/session_start_info",
        "metadata": {"plugin_data": {"plugin_name": "hparams", "content": data.SerializeToString()}},
        "tensor": {"dtype": "DT_FLOAT", "tensor_shape": {"dim": [{"size": 0}]}},
    }


def _set_aside(directory: Path) -> None:
    files = sorted(directory.glob(_OWN))
    if not files:
        return
    numbered = (directory / f"earlier-{number}" for number in count(1))
    aside = next(each for each in numbered if not each.exists())
    aside.mkdir()
    for file in files:
        file.rename(aside / file.name)
