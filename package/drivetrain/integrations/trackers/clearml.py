"""ClearML."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from drivetrain.core.errors import ConfigError
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, check_server, read_lines
from drivetrain.loggers.files import flat
from drivetrain.loggers.media import File, Histogram, Kind, Media, Table

_PATCHES = (
    *("catboost", "fastai", "gradio", "hydra", "joblib", "lightgbm", "matplotlib", "megengine", "pytorch"),
    *("scikit", "tensorboard", "tensorflow", "tfdefines", "xgboost"),
    # It runs git while another thread forks, and then hangs at times. The configuration has the commit.
    "detect_repository",
)
"""The names of ClearML's patches of other libraries, and of its search for a repository."""


@by_name
@final
class ClearMLLogger(Tracker):
    """Sends values of all kinds and the configuration to ClearML, and checkpoints by choice.

    A task that the program has opened by `Task.init` is used, and stays open afterwards. ClearML's patches of
    other libraries are off, because they would send values and checkpoints twice; its measurements of the
    machine stay on.

    "train/loss" and "validation/loss" are two lines of the plot "loss".

    Args:
        directory: The folder for values that could not be sent. Default: the run directory.
        project: The project; by default ClearML's own choice, the name of the repository.
        name: The task's name. Default: the name of the run directory.
        tags: Short labels.
        offline: Whether ClearML writes a session to its cache folder, for `Task.import_offline_session`, as
            `CLEARML_OFFLINE_MODE=1` does. The process stays offline afterwards.
        reuse: Whether a new fit overwrites the last task of the same project and name, if that task has no
            artifacts.
        id: The id of a task to continue. A resumed fit has it from the checkpoint.
        artifacts: "all" stores each checkpoint and the finished weights as artifacts, "best" the best
            checkpoint and the finished weights.
        options: Further arguments of `Task.init`.

    Raises:
        MissingDependencyError: clearml is not installed.
    """

    title = "ClearML"
    package = "clearml"
    extra = "clearml"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "file", "histogram", "image", "plotly figure", "table", "text", "video"}
    )
    advice = (
        "Run `clearml-init`, or set CLEARML_API_HOST, CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY; or"
        " write files and send them later: ClearMLLogger(offline=True) or CLEARML_OFFLINE_MODE=1"
    )
    settles = 60.0  # a thread of its own sends, or writes to its file

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        offline: bool = False,
        reuse: bool = False,
        id: str | None = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        self._project = project
        self._name = name
        self._offline = offline
        self._reuse = reuse
        self._options: dict[str, Any] = {"tags": list(tags) or None, **(options or {})}
        self._given_id = id
        self._task: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        from clearml import Task
        from clearml.backend_api import Session

        self._task = Task.current_task()
        self._is_ours = self._task is None
        if self._is_ours:
            if self._offline:
                Task.set_offline(True)
            if not Task.is_offline():
                check_server(f"{Session.get_api_server_host()}/debug.ping")
            task_id = resumed or self._given_id
            arguments = {
                "project_name": self._project,
                "task_name": self._name or self._run_name,
                "auto_connect_frameworks": dict.fromkeys(_PATCHES, False),
                "auto_connect_arg_parser": False,
                "reuse_last_task_id": task_id or self._reuse,
                # The number is what ClearML adds to each step. True would add the last one.
                "continue_last_task": False if task_id is None else 0,
            }
            self._task = Task.init(**{**arguments, **self._options})
            if task_id not in (None, self._task.id):
                self._close(failed=True)
                raise ConfigError(f"ClearML has no task {task_id!r} to continue. {self.advice}")
        values = {f"General/{name}": value for name, value in flat(dict(config))}
        self._task.set_parameters(values)
        self._task.set_configuration_object("config", config_dict=dict(config))
        return str(self._task.id)

    def _stored_until(self) -> int:
        # Measurements of the machine, whose titles begin with a colon, count seconds as steps.
        if type(self._task).is_offline():
            path = self._task.get_offline_mode_folder() / "metrics.jsonl"
            events = [each for line in read_lines(path.read_text()) for each in line] if path.exists() else []
            steps = [
                each["iter"] for each in events if "value" in each and not each["metric"].startswith(":")
            ]
            return max(steps, default=-1)
        scalars = self._task.get_reported_scalars()
        plots = [lines for title, lines in scalars.items() if not title.startswith(":")]
        return max(
            (int(step) for lines in plots for line in lines.values() for step in line["x"]), default=-1
        )

    def _send(self, record: StepRecord) -> None:
        for name, value in record.values.items():
            self._task.get_logger().report_scalar(*_line(name), value, iteration=record.step)
        for name, each in record.media.items():
            self._send_media(name, each, record.step)

    def _send_media(self, name: str, value: Media, step: int) -> None:
        reports = self._task.get_logger()
        if isinstance(value, File):
            self._store(value.path, name.replace("/", "-"), [])
        elif isinstance(value, Histogram):
            labels = [f"{edge:.4g}" for edge in value.counts.edges[:-1]]
            reports.report_histogram(*_line(name), list(value.counts.counts), step, xlabels=labels)
        elif isinstance(value, Table):
            reports.report_table(*_line(name), step, table_plot=[value.columns, *value.rows])
        else:
            # ClearML counts the files of a name, in a resumed fit from 0 again; so the ending has the step.
            # By default ClearML keeps five files of a name.
            ending, stream = f".{step}{value.suffix}", io.BytesIO(value.data)
            reports.report_media(*_line(name), step, stream=stream, file_extension=ending, max_history=-1)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        # Waits, because an old checkpoint may be deleted soon.
        stored = self._task.upload_artifact(
            f"{name}-{path.name}", str(path), metadata={"aliases": ", ".join(aliases)}, wait_on_upload=True
        )
        if not stored:
            raise ConnectionError("ClearML has not taken the artifact")

    def _close(self, failed: bool) -> None:
        if self._is_ours:
            if failed and not type(self._task).is_offline():
                self._task.mark_failed(force=True)
            self._task.close()

    @property
    def experiment(self) -> Any:
        """The `clearml.Task`."""
        if not self._is_open:
            self.log_config({})
        return self._task


def _line(name: str) -> tuple[str, str]:
    """Return the title of a plot and the name of a line in it: "train/loss" is the line "train" of "loss"."""
    split, _, title = name.rpartition("/")
    return title, split or title
