"""SwanLab."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, final

from drivetrain.core.errors import without_secrets
from drivetrain.core.files import make_directory
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name, one_of
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, remote_has_secret
from drivetrain.integrations.trackers.wandb_file import read_records
from drivetrain.loggers.media import Kind, Media, Table, Text


@by_name
@final
class SwanLabLogger(Tracker):
    """Sends values and the configuration to SwanLab, and checkpoints by choice.

    A run that the program has opened by `swanlab.init` is used, and stays open afterwards.

    Args:
        directory: The parent of the folder ``swanlog``. Default: the run directory.
        project: The project; by default SwanLab's own choice, such as `SWANLAB_PROJECT`.
        workspace: The user or organisation.
        name: The run's name. Default: the name of the run directory.
        group: The name of a group of runs.
        job_type: The kind of run within a group, such as "train".
        tags: Short labels.
        notes: A description.
        mode: "online", "offline", which writes files for `swanlab sync`, "local" or "disabled". Default:
            `SWANLAB_MODE`, else "online".
        id: The id of a run to continue. A resumed fit has it from the checkpoint.
        artifacts: "all" stores the files of each checkpoint and of the finished weights, "best" those of the
            best checkpoint and the finished weights.
        options: Further arguments of `swanlab.init`.

    Raises:
        MissingDependencyError: swanlab is not installed.
    """

    title = "SwanLab"
    package = "swanlab"
    extra = "swanlab"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"figure", "image", "plotly figure", "table", "text", "video"}
    )
    advice = (
        "Log in by `swanlab login`, or set SWANLAB_API_KEY; check project, workspace and SWANLAB_API_HOST; or"
        " write files and send them later: SwanLabLogger(mode='offline') or SWANLAB_MODE=offline"
    )
    settles = 60.0  # a thread of its own sends
    buffered = 256  # of its file, the last 8 KiB are in memory until the end

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        workspace: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline", "local", "disabled"] | None = None,
        id: str | None = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        if mode is not None:
            one_of("mode", mode, ("online", "offline", "local", "disabled"))
        self._arguments: dict[str, Any] = {
            "project": project,
            "workspace": workspace,
            "name": name,
            "group": group,
            "job_type": job_type,
            "tags": list(tags) or None,
            "description": notes,
            "mode": mode,
            **(options or {}),
        }
        self._given_id = id
        self._swanlab_run: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import swanlab

        self._is_ours = not swanlab.has_run()
        if self._is_ours:
            make_directory(self._folder)
            arguments = {**self._arguments, "id": resumed or self._given_id}
            arguments["name"] = arguments["name"] or self._run_name
            if arguments["id"] is not None:
                arguments.setdefault("resume", "allow")
            command = " ".join(sys.orig_argv)  # SwanLab asks the system for it
            hides = {"git": remote_has_secret(), "runtime": without_secrets(command) != command}
            if probe := {name: False for name, each in hides.items() if each}:
                arguments.setdefault("settings", swanlab.Settings(probe=probe))
            self._swanlab_run = swanlab.init(**{"log_dir": str(self._folder), **arguments})
        else:
            self._swanlab_run = swanlab.get_run()
        self._swanlab_run.config.update(dict(config))
        return str(self._swanlab_run.id)

    @property
    def _folder(self) -> Path:
        return self.directory / "swanlog"

    def _stored_until(self) -> int:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record

        if self._swanlab_run.mode == "online":
            return -1  # SwanLab asks its server, and drops values that the server has
        files = self._folder.glob(f"run-*-{self._id}/run-{self._id}.swanlab")
        records = [Record.FromString(each) for path in files for each in read_records(path)]
        return max((each.scalar.step for each in records if _is_value(each)), default=-1)

    def _send(self, record: StepRecord) -> None:
        media = {name: _media(each) for name, each in record.media.items()}
        self._swanlab_run.log({**record.values, **media}, step=record.step)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        files = f"{path}/**/*" if path.is_dir() else str(path)
        self._swanlab_run.save(files, base_path=str(path.parent), policy="now")

    def _close(self, failed: bool) -> None:
        if self._is_ours:
            self._swanlab_run.finish(**({"state": "crashed", "error": "the fit failed"} if failed else {}))

    @property
    def experiment(self) -> Any:
        """The `swanlab.Run`."""
        if not self._is_open:
            self.log_config({})
        return self._swanlab_run


def _is_value(record: Any) -> bool:
    """Return whether a record is a value that was logged, and no measurement of the machine."""
    return bool(record.HasField("scalar")) and not record.scalar.key.startswith("__swanlab__")


def _media(value: Media) -> Any:
    import swanlab

    if isinstance(value, (Text, Table)):
        return swanlab.Text(value.text if isinstance(value, Text) else value.markdown())
    if value.kind == "plotly figure":
        return swanlab.Html(value.data.decode())
    if value.kind == "video":
        return swanlab.Video(value.data)
    from PIL.Image import open as open_image

    return swanlab.Image(open_image(io.BytesIO(value.data)))
