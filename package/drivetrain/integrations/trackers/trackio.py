"""Trackio, a local tracker with a dashboard, which can also send to a Space of the Hugging Face Hub."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, final

from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, write_media
from drivetrain.loggers.media import Histogram, Kind, Media, Table, Text


@by_name
@final
class TrackioLogger(Tracker):
    """Sends values and the configuration to Trackio, and checkpoints by choice.

    Trackio keeps a database in its own folder, which `TRACKIO_DIR` sets; `trackio show` shows it. A run that
    the program has opened by `trackio.init` is used, and stays open afterwards.

    Args:
        directory: The folder for values that could not be sent. Default: the run directory.
        project: The project.
        name: The run's name, by which a resumed fit finds it. Default: the name of the run directory with a
            few random letters.
        group: A group of runs.
        space_id: A Space of the Hub that shows the runs, such as "me/runs". Default: none.
        artifacts: "all" stores each checkpoint and the finished weights as artifacts, "best" the best
            checkpoint and the finished weights.
        options: Further arguments of `trackio.init`.

    Raises:
        MissingDependencyError: trackio is not installed.
    """

    title = "Trackio"
    package = "trackio"
    extra = "trackio"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "histogram", "image", "table", "text", "video"}
    )
    advice = "Check project and space_id, and log in to the Hub by `hf auth login` for a Space"
    settles = 60.0  # a thread of its own writes to its database, or sends to a Space

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str = "drivetrain",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        self._arguments = {"project": project, "group": group, "space_id": space_id, **(options or {})}
        self._name = name
        self._trackio_run: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import trackio

        self._trackio_run = trackio.context_vars.current_run.get()
        self._is_ours = self._trackio_run is None
        if self._is_ours:
            name = resumed or self._name or f"{self._run_name or 'run'}-{secrets.token_hex(2)}"
            resume = "never" if resumed is None else "allow"
            arguments = {"name": name, "resume": resume, "config": dict(config), **self._arguments}
            self._trackio_run = trackio.init(**arguments)
        else:
            self._trackio_run.config.update(config)
        return str(self._trackio_run.name)

    def _stored_until(self) -> int:
        from trackio.sqlite_storage import SQLiteStorage

        if self._arguments["space_id"] is not None:  # which trackio has asked as it opened the run
            last = self._trackio_run._initial_last_step
        else:
            last = SQLiteStorage.get_max_step_for_run(self._trackio_run.project, self._trackio_run.name)
        return -1 if last is None else int(last)

    def _send(self, record: StepRecord) -> None:
        with TemporaryDirectory() as folder:  # trackio copies the files as they are logged
            files = write_media(record, Path(folder))
            media = {name: _media(value, files.get(name)) for name, value in record.media.items()}
            self._trackio_run.log({**record.values, **media}, step=record.step)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        import trackio

        artifact = trackio.Artifact(name, type="model")
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._trackio_run.log_artifact(artifact, aliases=aliases)

    def _close(self, failed: bool) -> None:
        if self._is_ours:
            import trackio

            self._trackio_run.finish()
            trackio.context_vars.current_run.set(None)

    @property
    def experiment(self) -> Any:
        """The `trackio.Run`."""
        if not self._is_open:
            self.log_config({})
        return self._trackio_run


def _media(value: Media, path: Path | None) -> Any:
    import trackio

    if isinstance(value, Histogram):
        return trackio.Histogram(np_histogram=(list(value.counts.counts), list(value.counts.edges)))
    if isinstance(value, Table):
        return trackio.Table(columns=value.columns, data=value.rows)
    if isinstance(value, Text):
        return trackio.Markdown(value.text)
    return {"audio": trackio.Audio, "video": trackio.Video}.get(value.kind, trackio.Image)(str(path))
