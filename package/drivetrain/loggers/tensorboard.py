"""Metrics as TensorBoard event files."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.loggers.files import Appended, to_json

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

_PATTERN = "events.out.tfevents.*"


class TensorBoardLogger:
    """Writes scalars, and the configuration as a text, to an event file that TensorBoard reads.

    All values of a log point go into one event, which is flushed when it is written.

    The first write of a new logger begins a new event file; files of an earlier run in the same directory are
    set aside in ``earlier-1``, which TensorBoard shows as a run of its own. After `load_state_dict` the
    earlier files stay instead, and TensorBoard is told to hide what they hold from after the state was taken.

    Args:
        directory: Where the event file goes; made at the first write.
    """

    # Why neither torch's SummaryWriter nor tensorboard's EventFileWriter, measured per scalar with 10 in a
    # log point: SummaryWriter.add_scalar, one event each, 24 us; EventFileWriter, one event for all, 5 us;
    # RecordWriter with a flush per event 3.3 us. The import takes 0.12 s for each of them. RecordWriter needs
    # no thread and no queue, so that nothing is lost in a kill and nothing is left running after close().

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._step = -1
        self._config = ""
        self._written_config = ""
        self._continues = False
        self._hidden: int | None = None
        self._path: Path | None = None
        self._file: Appended | None = None
        self._writer: RecordWriter | None = None
        self._event: Any = None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the scalars as one event; `step` is the number of updates made."""
        self._write_config()
        values = [{"tag": name, "simple_value": float(value)} for name, value in metrics.items()]
        self._write(step=step, summary={"value": values})
        self._step = max(self._step, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Show `config` on TensorBoard's text page; one equal to the resumed run's is not shown twice."""
        # Held back until the first metrics: only then is it certain whether the run resumes.
        self._config = json.dumps(to_json(config), indent=2, allow_nan=False)

    def close(self) -> None:
        """Write a configuration that is still held back and close the file; logging again reopens it."""
        self._write_config()
        self._close_file()

    def state_dict(self) -> dict[str, Any]:
        """The last step logged, -1 before the first, and the configuration shown."""
        return {"step": self._step, "config": self._written_config}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: what stands in the directory from later steps is hidden.

        Raises:
            OSError: That could not be written; it is with what is logged next.
        """
        self._close_file()
        self._step = int(state["step"])
        self._written_config = str(state["config"])
        self._continues = True
        self._path = None
        if any(self.directory.glob(_PATTERN)):
            self._hidden = self._step + 1
            self._hide()
            self._close_file()  # the run that loads may fail before it starts, and then nobody closes

    def _hide(self) -> None:
        hidden, self._hidden = self._hidden, None
        try:
            # TensorBoard drops what it has read so far from this step on when it meets a session's start.
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
        # Markdown shows what is indented by four spaces as it stands.
        text = "".join(f"    {line}\n" for line in self._config.splitlines())
        value = {
            "tag": "config/text_summary",
            "metadata": {"plugin_data": {"plugin_name": "text"}},
            "tensor": {
                "dtype": "DT_STRING",
                "string_val": [text.encode()],
                "tensor_shape": {"dim": [{"size": 1}]},
            },
        }
        self._write(step=max(self._step, 0), summary={"value": [value]})
        self._written_config = self._config

    def _write(self, **event: Any) -> None:
        if self._file is not None and self._file.is_gone:
            warnings.warn(f"{self._path} was deleted while it was written to; another begins", stacklevel=4)
            self._close_file()
            self._path, self._written_config = None, ""
            self._write_config()
        if self._hidden is not None:
            self._hide()
        writer = self._writer or self._open()
        writer.write(self._event(wall_time=time.time(), **event).SerializeToString())
        writer.flush()

    def _open(self) -> RecordWriter:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._continues:
            _set_aside(self.directory)
            self._continues = True
        self._event = Event
        path = self._path
        if path is None:
            # TensorBoard reads a directory's files in the order of their names, so that the time comes first,
            # and finely enough that a quick restart's file follows the one before.
            seconds, fraction = divmod(time.time_ns(), 1_000_000_000)
            name = f"events.out.tfevents.{seconds:010d}.{fraction:09d}.{socket.gethostname()}.{os.getpid()}"
            path = self.directory / name
        file = Appended(path)
        writer = RecordWriter(file)
        if self._path is None:
            # Version 2 says that restarts are marked by session logs and not guessed from the order of steps.
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


def _set_aside(directory: Path) -> None:
    files = sorted(directory.glob(_PATTERN))
    if not files:
        return
    number = 1
    while (aside := directory / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for file in files:
        file.rename(aside / file.name)
