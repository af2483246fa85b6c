"""Comet."""

from __future__ import annotations

import csv
import io
import itertools
import json
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from drivetrain.core.files import make_directory, open_file, read_json
from drivetrain.core.messages import logger
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import (
    Artifacts,
    StepRecord,
    Tracker,
    read_lines,
    remote_has_secret,
)
from drivetrain.loggers.files import flat
from drivetrain.loggers.media import Histogram, Kind, Media, Table, Text

_LOG = logger(__name__)

_MESSAGES = "messages.json"
_EMPTY = 22
"""The bytes of an archive without files, which Comet makes when it opens an offline experiment."""


@by_name
@final
class CometLogger(Tracker):
    """Sends values of all kinds and the configuration to Comet, and checkpoints by choice.

    An experiment that the program has opened is used, and stays open afterwards. Comet's own logging of
    metrics that it finds in other libraries is off, because it would log values twice.

    Args:
        directory: The parent of the folder ``comet`` with offline archives. Default: the run directory.
        project: The project; by default Comet's own choice, such as `COMET_PROJECT_NAME`.
        workspace: The workspace.
        name: The experiment's name. Default: the name of the run directory.
        tags: Short labels.
        online: Whether values are sent to a server. False writes an archive for `comet upload`. Default:
            `COMET_START_ONLINE`, else True.
        id: The key of an experiment to continue. A resumed fit has it from the checkpoint.
        artifacts: "all" stores each checkpoint and the finished weights as models, "best" the best checkpoint
            and the finished weights.
        options: Further arguments of `comet_ml.ExperimentConfig`.

    Raises:
        MissingDependencyError: comet_ml is not installed.
    """

    title = "Comet"
    package = "comet_ml"
    extra = "comet"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "file", "histogram", "image", "plotly figure", "table", "text", "video"}
    )
    advice = (
        "Log in by `comet login`, or set COMET_API_KEY; check workspace and COMET_URL_OVERRIDE; or write an"
        " archive and send it later: CometLogger(online=False) or COMET_START_ONLINE=false"
    )
    settles = 60.0  # a thread of its own sends, or writes to its file

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        workspace: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        online: bool | None = None,
        id: str | None = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        self._where = {"project_name": project, "workspace": workspace, "online": online}
        self._name = name
        self._options: dict[str, Any] = {"tags": list(tags) or None, **(options or {})}
        self._given_id = id
        self._experiment: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import comet_ml

        self._experiment = comet_ml.get_running_experiment()
        self._is_ours = self._experiment is None or not self._experiment.alive  # one that has ended stays
        if self._is_ours:
            make_directory(self._folder)
            self._pack_the_killed()
            key = resumed or self._given_id
            # Its measurement of emissions asks other servers where this machine is; our CodeCarbon does not.
            chosen: dict[str, Any] = {
                "auto_metric_logging": False,
                "auto_log_co2": False,
                "display_summary_level": 0,
                "name": self._name or self._run_name,
                "offline_directory": str(self._folder),
            }
            if remote_has_secret():
                chosen["log_git_metadata"] = False
            settings = comet_ml.ExperimentConfig(**{**chosen, **self._options})
            mode = "create" if key is None else "get"
            begin: Any = comet_ml.start
            self._experiment = begin(**self._where, experiment_key=key, mode=mode, experiment_config=settings)
            if not self._experiment.alive and not self._experiment.disabled:
                self._experiment.end()
                raise ConnectionError("no server answers, or it refuses the key")
            if self._is_offline:
                self._note_for_a_kill()
            if key is None and self._run is not None:
                self._experiment.set_model_graph(str(self._run.task))
        self._experiment.log_parameters(dict(flat(dict(config))))
        return str(self._experiment.get_key())

    def _stored_until(self) -> int:
        if self._is_offline:
            found = [
                each["payload"]["metric"]
                for archive in self._folder.glob(f"{self._id}*.zip")
                for each in _messages(archive)
                if each["type"] == "metric_msg"
            ]
            steps = [(each["metricName"], each["step"]) for each in found]
        else:
            import comet_ml

            summary = comet_ml.APIExperiment(previous_experiment=self._id).get_metrics_summary()
            steps = [(each["name"], each.get("stepCurrent")) for each in summary]
        # Measurements of the machine have steps of their own.
        return max((int(step) for name, step in steps if step and not name.startswith("sys.")), default=-1)

    def _send(self, record: StepRecord) -> None:
        self._experiment.log_metrics(dict(record.values), step=record.step)
        for name, value in record.media.items():
            self._send_media(name, value, record.step)

    def _send_media(self, name: str, value: Media, step: int) -> None:
        if isinstance(value, Histogram):
            self._experiment.log_histogram_3d(_histogram(value), name, step)
        elif isinstance(value, Text):
            self._experiment.log_text(value.text, step, {"name": name})
        elif isinstance(value, Table):
            text = io.StringIO()  # log_table writes the rows of a single column as lists
            csv.writer(text).writerows([value.columns, *value.rows])
            file = f"{name}/step-{step:08d}.csv"
            self._experiment.log_asset(io.BytesIO(text.getvalue().encode()), file, step=step)
        elif value.kind in ("image", "figure"):
            self._experiment.log_image(io.BytesIO(value.data), name, step=step)
        elif value.kind == "video":
            self._experiment.log_video(io.BytesIO(value.data), name, format="gif", step=step)
        else:
            file = f"{name}/step-{step:08d}{value.suffix}"
            self._experiment.log_asset(io.BytesIO(value.data), file, step=step)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        self._experiment.log_model(name, str(path), metadata={"aliases": ", ".join(aliases)})
        # Its thread reads the files, and an old checkpoint may be deleted soon.
        self._experiment.flush()

    def _close(self, failed: bool) -> None:
        if self._is_ours:
            self._experiment.end()
            self._note.unlink(missing_ok=True)

    @property
    def experiment(self) -> Any:
        """The `comet_ml.CometExperiment`."""
        if not self._is_open:
            self.log_config({})
        return self._experiment

    # Offline. Comet collects everything in a folder for temporary files, and makes the archive in the end.

    @property
    def _is_offline(self) -> bool:
        import comet_ml

        return isinstance(self._experiment, comet_ml.OfflineExperiment)

    @property
    def _folder(self) -> Path:
        return self.directory / "comet"

    @property
    def _note(self) -> Path:
        return self._folder / "unfinished.json"

    def _note_for_a_kill(self) -> None:
        opened = self._experiment
        about = {
            "tempdir": opened.tmpdir,
            "experiment_key": opened.get_key(),
            "workspace": opened.workspace,
            "project_name": opened.project_name,
            "start_time": opened.start_time,
            "tags": opened.get_tags(),
            "resume_strategy": opened.resume_strategy,
            "comet_start_sourced": True,
        }
        with open_file(self._note, "w", encoding="utf-8") as file:
            file.write(json.dumps(about))

    def _pack_the_killed(self) -> None:
        """Make the archive that a killed fit in this directory could not make."""
        from comet_ml import offline_utils

        if not self._note.exists():
            return
        about = read_json(self._note)
        key, folder = about["experiment_key"], Path(about["tempdir"])
        for empty in self._folder.glob(f"{key}*.zip"):
            if empty.stat().st_size <= _EMPTY:
                empty.unlink()
        if (messages := folder / _MESSAGES).exists():
            whole = messages.read_text(encoding="utf-8").rpartition("\n")
            with open_file(messages, "w", encoding="utf-8") as file:
                file.write(whole[0] + whole[1])
            offline_utils.write_experiment_meta_file(**about, stop_time=int(time.time() * 1000))
            with zipfile.ZipFile(self._folder / f"{key}-{folder.name}.zip", "w") as archive:
                for each in sorted(folder.iterdir()):
                    archive.write(each, each.name)
        else:
            _LOG.warning(f"{self.title} has lost the values of a killed fit, which were in {folder}")
        self._note.unlink()


def _histogram(value: Histogram) -> Any:
    """Return a histogram of Comet, with the middle of each bin as often as the bin counts."""
    from comet_ml.data_structure import Histogram as CometHistogram

    edges = value.counts.edges
    made = CometHistogram()
    made.add([(low + high) / 2 for low, high in itertools.pairwise(edges)], list(value.counts.counts))
    return made


def _messages(archive: Path) -> list[dict[str, Any]]:
    if archive.stat().st_size <= _EMPTY:
        return []
    with zipfile.ZipFile(archive) as opened:
        return list(read_lines(opened.read(_MESSAGES).decode("utf-8")))
