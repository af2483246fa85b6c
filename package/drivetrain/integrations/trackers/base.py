"""The base of all trackers: what is the same for each of them is written here once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from drivetrain.callbacks.summary import summarize
from drivetrain.core.errors import ConfigError, DrivetrainError, MissingDependencyError, without_secrets
from drivetrain.core.files import open_file
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.core.types import Json
from drivetrain.core.validation import one_of
from drivetrain.loggers.files import set_aside, to_json, with_epoch
from drivetrain.loggers.media import BinCounts, Histogram, Kind, Media

if TYPE_CHECKING:
    from drivetrain.callbacks.checkpoint import CheckpointSaver
    from drivetrain.run.run import Run

_LOG = logger(__name__)

Artifacts = Literal["none", "best", "all"]
"""The checkpoints that a tracker stores."""

_RETRY = 5.0
"""Seconds until a background thread tries again to reach a server, if no new values wake it before."""

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""The colours of a terminal, which some packages put into their messages."""


def check_server(address: str) -> None:
    """Check that a server answers, for a package that alone would try again for minutes.

    Raises:
        ConnectionError: It does not.
    """
    import requests

    try:
        requests.get(address, timeout=10)
    except requests.RequestException as error:
        raise ConnectionError(f"no server answers at {address} ({error})") from error


@contextmanager
def _command_without_secrets() -> Iterator[None]:
    """Hide the secrets in the command line from the packages of trackers, which store it themselves."""
    given = sys.argv
    sys.argv = [without_secrets(each) for each in given]
    try:
        yield
    finally:
        sys.argv = given


def remote_has_secret() -> bool:
    """Return whether a remote of Git has a password in its address, which some trackers would store."""
    try:
        command = ["git", "config", "--get-regexp", r"^remote\..*url$"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return without_secrets(found) != found


def read_lines(text: str) -> Iterator[Any]:
    """Yield what each line has in JSON, without a last line that was cut short by a kill."""
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


@dataclass
class StepRecord:
    """The values of one step.

    Attributes:
        step: The number of steps made.
        time: When the first of them was logged, in seconds since the epoch. A second attempt to send
            a record has the same time, so that a server can drop a duplicate.
        values: The scalars by name.
        media: The values beside numbers by name, such as images, already on the host.
        sent: When it was sent, on `time.monotonic`'s clock; None before.
    """

    step: int
    time: float = field(default_factory=time.time)
    values: dict[str, float] = field(default_factory=dict)
    media: dict[str, Media] = field(default_factory=dict)
    sent: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return its content; of the media the histograms alone."""
        counted = {name: each.counts for name, each in self.media.items() if isinstance(each, Histogram)}
        histograms = {name: to_json(asdict(each)) for name, each in counted.items()}
        return {"step": self.step, "time": self.time, "values": dict(self.values), "histograms": histograms}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepRecord:
        """Return a record with the content that `to_json` gave."""
        values = {name: float(each) for name, each in content["values"].items()}
        media = {name: Histogram(BinCounts(**each)) for name, each in content["histograms"].items()}
        return cls(int(content["step"]), float(content["time"]), values, {**media})


class Tracker(ABC):
    """A logger that sends values to an experiment tracker through the tracker's own package.

    A subclass opens a run of the tracker, sends a record and closes the run. The base collects all values of
    one step into one record, which is sent when the next step logs something, or at the end.

    A failure never ends training: values are kept, with one warning, and sent again later. Values that are
    still not sent when the run ends are in ``unsent-<tracker>.jsonl`` in the directory. Before the first
    step a failure is an error, because its cause is a missing key or a wrong address.

    A checkpoint has the id of the tracker's run, and those records that a kill could still lose, without
    images and other files. A resumed fit continues that run: records up to the last step that the tracker has
    are not sent again.

    Args:
        directory: Where the tracker's local files go. Default: the run directory.
        artifacts: "all" stores each checkpoint and the finished weights in the tracker, "best" the best
            checkpoint and the finished weights, when the fit ends; "none" stores neither.

    Attributes:
        title: The tracker's name in messages.
        package: The package that it needs.
        extra: The extra of drivetrain that brings the package; also the logger's name.
        takes: The kinds of values beside numbers that it takes; see `drivetrain.loggers.Media`.
        advice: What a user can do if the tracker cannot be opened; the end of a message.
        waits: Whether sending waits for a server, so that drivetrain sends in a thread. Most trackers'
            packages have a queue of their own.
        settles: The seconds after which a kill of this process can no longer lose what was sent.
        buffered: The number of log points whose values a kill can lose however long ago they were sent.
        patience: The seconds that the end of a run waits for a server that does not answer.
    """

    title: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]
    takes: ClassVar[frozenset[Kind]] = frozenset()
    advice: ClassVar[str]
    waits: ClassVar[bool] = False
    settles: ClassVar[float] = 0.0
    buffered: ClassVar[int] = 0
    patience: ClassVar[float] = 30.0

    def __init__(self, directory: str | Path | None = None, *, artifacts: Artifacts = "none") -> None:
        if not is_installed(self.package):
            raise MissingDependencyError(self.package, self.extra, type(self).__name__)
        one_of("artifacts", artifacts, ("none", "best", "all"))
        self.artifacts = artifacts
        self._given_directory = directory
        self._run: Run | None = None
        self._id: str | None = None
        self._is_open = False
        self._trainer_run_name: Any = None
        self._last_step = -1  # of the tracker, when the run was resumed
        self._restored: list[StepRecord] = []
        self._records: deque[StepRecord] = deque()  # the last one may still get values
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake, self._ending = threading.Event(), threading.Event()
        self._failure: Exception | None = None

    # Each tracker's own part.

    @abstractmethod
    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        """Open a run, or use one that the program has open, and store the configuration.

        Args:
            resumed: The id of the run to continue; None for a new one.
            config: The configuration, nested.

        Returns:
            The run's id.
        """

    @abstractmethod
    def _stored_until(self) -> int:
        """Return the last step whose values the continued run has, -1 for none."""

    @abstractmethod
    def _send(self, record: StepRecord) -> None:
        """Send one record. It raises if it cannot."""

    @abstractmethod
    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        """Store a checkpoint's directory, or a file of weights.

        Args:
            path: The directory or file.
            name: "checkpoint" or "weights".
            aliases: "latest", "best" and the name of the directory, as they apply.
        """

    @abstractmethod
    def _close(self, failed: bool) -> None:
        """Close the run, unless the program had opened it."""

    @property
    @abstractmethod
    def experiment(self) -> Any:
        """The tracker's own object."""

    # Calls from a run.

    def begin(self, run: Run) -> None:
        """Get ready for a fit, which begins a new run of the tracker unless it resumes.

        Raises:
            ConfigError: The fit has two loggers of this kind.
        """
        if [type(each) for each in run.loggers].count(type(self)) > 1:
            raise ConfigError(
                f"loggers has two {type(self).__name__}, and both would write to the same run. Give one"
            )
        self._run, self._id, self._last_step, self._restored = run, None, -1, []

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the tracker's run, and the records that a kill could still lose."""
        with self._changing:
            self._forget_settled()
            return {"id": self._id, "records": [each.to_json() for each in self._records]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of `state` when the configuration is logged, unless a run is open."""
        if self._is_open:
            return
        self._id = state["id"]
        self._restored = [StepRecord.from_json(each) for each in state["records"]]

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Open the tracker's run and store the configuration there.

        Raises:
            ConfigError: It cannot be opened; says what to do.
        """
        resumed = self._id
        tree = to_json(config)
        assert isinstance(tree, dict)
        trainer = tree.get("trainer")
        self._trainer_run_name = trainer.get("run_name") if isinstance(trainer, dict) else None
        if self._run is not None:
            total = summarize(self._run.task, depth=0).total
            tree["model"] = {"parameters": total.parameters, "trainable": total.trainable}
        try:
            with _command_without_secrets():
                self._id = self._open(resumed, tree)
            self._is_open = True
            if resumed is not None and self._id == resumed:
                self._continue()
        except DrivetrainError:
            raise
        except Exception as error:
            why = " ".join(_COLOURS.sub("", str(error)).split()).rstrip(".") or type(error).__name__
            told = "".join(traceback.format_exception(error))
            cause = error if without_secrets(told) == told else None
            raise ConfigError(f"{self.title} cannot be opened: {why}. {self.advice}") from cause
        if resumed is None:
            set_aside(self._unsent)
        if self.waits:
            self._wake.clear()
            self._ending.clear()
            self._thread = threading.Thread(target=self._send_in_background, name=self.extra, daemon=True)
            self._thread.start()

    def _continue(self) -> None:
        self._last_step = self._stored_until()
        lost = [each for each in self._restored if each.step > self._last_step]
        self._records.extend(lost)
        self._restored = []
        self._unsent.unlink(missing_ok=True)
        begins = self._run.progress.steps if self._run is not None else self._last_step
        if self._last_step > begins:
            _LOG.info(
                f"{self.title} has the values up to step {self._last_step} from before the resume; steps"
                f" {begins + 1} to {self._last_step} are not sent again"
            )

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add values and the number of epochs to the record of a step, and send the record before it."""
        self._add(step, with_epoch(metrics, self._run), {})

    def log_media(self, values: Mapping[str, Media], step: int) -> None:
        """Add values of the kinds that it takes to the record of a step."""
        self._add(step, {}, values)

    def _add(self, step: int, values: Mapping[str, float], media: Mapping[str, Media]) -> None:
        if not self._is_open:
            self.log_config({})
        if step <= self._last_step:
            return
        with self._changing:
            if not self._records or self._records[-1].step != step or self._records[-1].sent is not None:
                self._records.append(StepRecord(step))
            self._records[-1].values.update(values)
            self._records[-1].media.update(media)
        if self._thread is None:
            self._send_due()
        else:
            self._wake.set()

    def log_checkpoint(self, address: str) -> None:
        """Store a checkpoint that has just been saved, if `artifacts` is "all"."""
        if self.artifacts == "all":
            self._try_to_store(address, "checkpoint", ["latest"])

    def close(self) -> None:
        """Send what is left, and write to a file what cannot be sent; then close the tracker's run."""
        if not self._is_open:
            return
        self._is_open = False
        failed = self._run is not None and self._run.exception is not None
        if self._thread is None:
            self._send_rest()
        else:
            self._ending.set()
            self._wake.set()
            self._thread.join(self.patience)
            self._thread = None
        if not failed and self._failure is None:
            self._store_the_end()
        self._write_unsent()
        try:
            self._close(failed)
        except Exception as error:
            _LOG.warning(f"{self.title} could not be closed in order: {error}")

    # Directories and files.

    @property
    def directory(self) -> Path:
        """Where the tracker's local files go."""
        if self._given_directory is not None:
            return Path(self._given_directory).absolute()
        run_dir = None if self._run is None else self._run.run_dir
        return Path.cwd() if run_dir is None else run_dir

    @property
    def _unsent(self) -> Path:
        return self.directory / f"unsent-{self.extra}.jsonl"

    @property
    def _run_name(self) -> str | None:
        """`Trainer(run_name=)` where a `run_dir` is given too, else the name of the run directory."""
        directory = None if self._run is None or self._run.run_dir is None else self._run.run_dir.name
        name = self._trainer_run_name
        return name if directory is None or not directory.startswith(name or directory) else directory

    # Sending.

    def _forget_settled(self) -> None:
        now = time.monotonic()
        while len(self._records) > self.buffered and self._records[0].sent is not None:
            if now - self._records[0].sent < self.settles:
                return
            self._records.popleft()

    def _next(self, all_of_them: bool) -> StepRecord | None:
        with self._changing:
            self._forget_settled()
            due = list(self._records) if all_of_them else list(self._records)[:-1]
        return next((each for each in due if each.sent is None), None)

    def _send_due(self, all_of_them: bool = False) -> None:
        while (record := self._next(all_of_them)) is not None:
            try:
                self._send(record)
            except Exception as error:
                if self._failure is None:
                    _LOG.warning(
                        f"{self.title} does not take the values of step {record.step}: {error}. Training goes"
                        " on; values are kept, and sent when it takes them again"
                    )
                self._failure = error
                return
            record.sent = time.monotonic()
            if self._failure is not None:
                self._failure = None
                _LOG.info(f"{self.title} takes values again")

    def _send_in_background(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(_RETRY if self._failure is not None else None)
            self._wake.clear()
            self._send_due()
        self._send_rest()

    def _send_rest(self) -> None:
        ends = time.monotonic() + self.patience
        self._send_due(all_of_them=True)
        while self._failure is not None and time.monotonic() + 1.0 < ends:
            time.sleep(1.0)
            self._send_due(all_of_them=True)

    def _write_unsent(self) -> None:
        with self._changing:
            left = [each for each in self._records if each.sent is None]
            self._records.clear()
        if not left:
            return
        lines = [json.dumps(to_json(each.to_json()), allow_nan=False) for each in left]
        self._unsent.parent.mkdir(parents=True, exist_ok=True)
        with open_file(self._unsent, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        for each in left:
            write_media(each, self._unsent.with_suffix(""))
        _LOG.warning(
            f"{self.title} lacks the values of steps {left[0].step} to {left[-1].step}"
            f" ({self._failure or 'it did not answer in time'}). They are in {self._unsent}"
        )

    # Checkpoints.

    def _store_the_end(self) -> None:
        if self.artifacts == "none" or self._run is None:
            return
        saver = self._saver()
        if saver is None:
            _LOG.warning(
                f"{type(self).__name__}(artifacts={self.artifacts!r}): this fit saves no checkpoints"
            )
            return
        for best in saver.best_checkpoints().values():
            self._try_to_store(best, "checkpoint", ["best"])
        if saver.weights is not None:
            self._try_to_store(saver.weights, "weights", ["latest"])

    def _saver(self) -> CheckpointSaver | None:
        from drivetrain.callbacks.checkpoint import CheckpointSaver

        callbacks = () if self._run is None else self._run.callbacks
        return next((each for each in callbacks if isinstance(each, CheckpointSaver)), None)

    def _try_to_store(self, address: str, name: str, aliases: list[str]) -> None:
        try:
            if "://" in address:
                raise ValueError("only files on this machine are stored")
            self._store(Path(address), name, [*aliases, Path(address).name])
        except Exception as error:
            _LOG.warning(f"{self.title} has not stored {address}: {error}. Training goes on")


def write_media(record: StepRecord, folder: Path) -> dict[str, Path]:
    """Write the values beside numbers to files, by the names of the values; histograms are no files.

    Args:
        record: The record.
        folder: The folder, with a folder for each part of a name; made if there is anything to write.
    """
    written: dict[str, Path] = {}
    for name, value in record.media.items():
        if not isinstance(value, Histogram):
            subfolder = folder.joinpath(*(part for part in name.split("/") if part not in ("", ".", "..")))
            subfolder.mkdir(parents=True, exist_ok=True)
            written[name] = subfolder / f"step-{record.step:08d}{value.suffix}"
            with open_file(written[name], "wb") as file:
                file.write(value.data)
    return written
