"""Neptune, whose hosted service has ended, on a self-hosted server."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from drivetrain.core.types import Json
from drivetrain.core.validation import by_name, one_of
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, read_lines
from drivetrain.loggers.media import Kind, Media

_PATIENCE = 600
"""Seconds that the end of a run waits until Neptune has everything; by default that is for ever."""


@by_name
@final
class NeptuneLogger(Tracker):
    """Sends values of all kinds and the configuration to a Neptune 2 server, and checkpoints by choice.

    Neptune's hosted service ended on 5 March 2026. This logger is for a self-hosted server, through the last
    1.x release of Neptune's package.

    Args:
        directory: The folder for values that could not be sent. Default: the run directory.
        project: The project, as "workspace/name". Default: `NEPTUNE_PROJECT`.
        name: The run's name. Default: the name of the run directory.
        tags: Short labels.
        namespace: The first part of all names.
        mode: "async", "sync", "offline", which writes files for `neptune sync`, or "debug". Default:
            `NEPTUNE_MODE`, else "async".
        run: A `neptune.Run` of the program's, which stays open afterwards.
        artifacts: "all" stores the files of each checkpoint and of the finished weights, "best" those of the
            best checkpoint and the finished weights.
        options: Further arguments of `neptune.init_run`.

    Raises:
        MissingDependencyError: neptune is not installed.
    """

    title = "Neptune"
    package = "neptune"
    extra = "neptune"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "file", "histogram", "image", "plotly figure", "table", "text", "video"}
    )
    advice = (
        "Neptune's hosted service ended on 5 March 2026. For a self-hosted one, check NEPTUNE_API_TOKEN"
        " and project; or write files and send them later: NeptuneLogger(mode='offline')"
    )

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        namespace: str = "training",
        mode: Literal["async", "sync", "offline", "debug"] | None = None,
        run: Any = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        if mode is not None:
            one_of("mode", mode, ("async", "sync", "offline", "debug"))
        self._arguments: dict[str, Any] = {"project": project, "tags": list(tags) or None, "mode": mode}
        self._arguments |= options or {}
        self._name = name
        self._namespace = namespace
        self._given = run
        self._neptune_run: Any = None

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import neptune
        from neptune.utils import stringify_unsupported

        run_id = resumed or secrets.token_hex(16)
        if self._given is None:
            arguments = {"custom_run_id": run_id, "name": self._name or self._run_name, **self._arguments}
            self._neptune_run = neptune.init_run(**arguments)
        else:
            self._neptune_run = self._given
        # Offline, each start is a run of its own; this label says which belong together.
        self._neptune_run["sys/group_tags"].add([run_id])
        self._neptune_run[f"{self._namespace}/config"] = stringify_unsupported(dict(config))
        return run_id

    @property
    def _is_offline(self) -> bool:
        return (self._arguments["mode"] or os.environ.get("NEPTUNE_MODE")) == "offline"

    def _stored_until(self) -> int:
        prefix = [self._namespace, "metrics"]
        if not self._is_offline:
            found = self._neptune_run.get_structure().get(self._namespace, {}).get("metrics", {})
            return max((int(each.fetch_values()["step"].max()) for each in _series(found)), default=-1)
        folder = Path(os.environ.get("NEPTUNE_DATA_DIRECTORY", ".neptune"))
        texts = [each.read_text(encoding="utf-8") for each in folder.glob("offline/run__*/data-*.log")]
        lines = [each["obj"] for text in texts if f'"{self._id}"' in text for each in read_lines(text)]
        values = [
            each["values"] for each in lines if each["type"] == "LogFloats" and each["path"][:2] == prefix
        ]
        return max((int(each["step"]) for some in values for each in some), default=-1)

    def _send(self, record: StepRecord) -> None:
        for name, value in record.values.items():
            self._neptune_run[f"{self._namespace}/metrics/{name}"].append(
                value, step=record.step, timestamp=record.time
            )
        for name, each in record.media.items():
            self._send_media(name, each, record.step)
        self._neptune_run.wait(disk_only=True)  # a kill loses nothing that is on disk

    def _send_media(self, name: str, value: Media, step: int) -> None:
        from neptune.types import File

        file = File.from_content(value.data, extension=value.suffix.removeprefix("."))
        field = f"{self._namespace}/media/{name}"
        if value.kind in ("image", "figure"):
            self._neptune_run[field].append(file, step=step)
        else:
            self._neptune_run[f"{field}/step-{step:08d}"].upload(file)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        field = self._neptune_run[f"{self._namespace}/{name}/{path.name}"]
        if path.is_dir():
            field.upload_files(f"{path}/**/*")
        else:
            field.upload(str(path))
        for alias in {*aliases} & {"best", "latest"}:
            self._neptune_run[f"{self._namespace}/{name}/{alias}"] = path.name

    def _close(self, failed: bool) -> None:
        if self._given is None:
            self._neptune_run["sys/failed"] = failed
            self._neptune_run.stop(seconds=_PATIENCE)

    @property
    def experiment(self) -> Any:
        """The `neptune.Run`."""
        if not self._is_open:
            self.log_config({})
        return self._neptune_run


def _series(structure: Mapping[str, Any]) -> list[Any]:
    parts = [_series(each) if isinstance(each, dict) else [each] for each in structure.values()]
    return [each for part in parts for each in part]
