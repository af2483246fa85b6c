"""DVCLive, whose files belong into a repository of Git and DVC."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, final

from drivetrain.core.files import read_json
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, write_media
from drivetrain.loggers.files import flat
from drivetrain.loggers.media import Kind


@by_name
@final
class DVCLiveLogger(Tracker):
    """Writes values and the configuration to the files of DVCLive, and tracks checkpoints by choice.

    Args:
        directory: The parent of the folder ``dvclive``. Default: the run directory.
        live: A `dvclive.Live` of the program's, which stays open afterwards.
        artifacts: "all" tracks each checkpoint and the finished weights with DVC, "best" the best checkpoint
            and the finished weights.
        options: Further arguments of `dvclive.Live`, such as `save_dvc_exp=False`.

    Raises:
        MissingDependencyError: dvclive is not installed.
    """

    title = "DVCLive"
    package = "dvclive"
    extra = "dvclive"
    takes: ClassVar[frozenset[Kind]] = frozenset({"figure", "image"})
    advice = "Give a directory that can be written to"

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        live: Any = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        self._given = live
        self._options = dict(options or {})
        self._live: Any = None

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        from dvclive import Live

        folder = str(self.directory / "dvclive")
        self._live = self._given or Live(**{"dir": folder, "resume": resumed is not None, **self._options})
        self._live.log_params(dict(flat(dict(config))))
        return Path(self._live.dir).name

    def _stored_until(self) -> int:
        summary = Path(self._live.dir) / "metrics.json"
        return int(read_json(summary).get("step", -1)) if summary.exists() else -1

    def _send(self, record: StepRecord) -> None:
        self._live.step = record.step
        for name, value in record.values.items():
            self._live.log_metric(name, value)
        with TemporaryDirectory() as folder:
            for name, path in write_media(record, Path(folder)).items():
                self._live.log_image(f"{name}/{record.step}.png", path)
        self._live.make_summary()

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        self._live.log_artifact(path, type="model", name=name, labels=aliases)

    def _close(self, failed: bool) -> None:
        if self._given is None:
            self._live.end()

    @property
    def experiment(self) -> Any:
        """The `dvclive.Live`."""
        if not self._is_open:
            self.log_config({})
        return self._live
