"""Weights & Biases."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, final

from drivetrain.core.files import make_directory
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name, one_of
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, write_media
from drivetrain.integrations.trackers.wandb_file import read_history
from drivetrain.loggers.media import Histogram, Kind, Media, Table, Text

STEP = "step"
"""The name of the number of steps, which W&B's charts have as their x-axis."""

_FORBIDDEN = re.compile(r"[^\w\-.]", re.ASCII)
"""Characters that no artifact may have in its name."""


@by_name
@final
class WandbLogger(Tracker):
    """Sends values of all kinds and the configuration to Weights & Biases, and checkpoints by choice.

    A run that the program has opened by `wandb.init` is used, and stays open afterwards. W&B's measurements
    of the machine stay on.

    Args:
        directory: The parent of W&B's folder ``wandb``. Default: the run directory.
        project: The project; by default W&B's own choice, such as `WANDB_PROJECT`.
        entity: The user or team.
        name: The run's name. Default: the name of the run directory.
        group: The name of a group of runs.
        job_type: The kind of run within a group, such as "train".
        tags: Short labels.
        notes: A description.
        mode: "online", "offline", which writes files for `wandb sync`, or "disabled". Default: `WANDB_MODE`,
            else "online".
        id: The id of a run to continue. A resumed fit has it from the checkpoint.
        watch: "gradients", "parameters" or "all" sends W&B's own histograms of them.
        artifacts: "all" stores each checkpoint and the finished weights as artifacts, "best" the best
            checkpoint and the finished weights.
        options: Further arguments of `wandb.init`.

    Raises:
        MissingDependencyError: wandb is not installed.
    """

    title = "W&B"
    package = "wandb"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "file", "histogram", "image", "plotly figure", "table", "text", "video"}
    )
    extra = "wandb"
    advice = (
        "Log in by `wandb login`, or set WANDB_API_KEY; check project, entity and WANDB_BASE_URL; or write"
        " files and send them later: WandbLogger(mode='offline') or WANDB_MODE=offline"
    )
    settles = 60.0  # its process writes its file every 15 s, and sends to its server about as often

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        id: str | None = None,
        watch: Literal["gradients", "parameters", "all"] | None = None,
        artifacts: Artifacts = "none",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        if mode is not None:
            one_of("mode", mode, ("online", "offline", "disabled"))
        if watch is not None:
            one_of("watch", watch, ("gradients", "parameters", "all"))
        self._arguments: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "name": name,
            "group": group,
            "job_type": job_type,
            "tags": list(tags) or None,
            "notes": notes,
            "mode": mode,
            **(options or {}),
        }
        self._given_id = id
        self._watch = watch
        self._wandb_run: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import wandb

        self._is_ours = wandb.run is None
        if self._is_ours:
            make_directory(self.directory)
            arguments = {**self._arguments, "id": resumed or self._given_id}
            arguments["name"] = arguments["name"] or self._run_name
            is_offline = (arguments["mode"] or os.environ.get("WANDB_MODE")) == "offline"
            if arguments["id"] is not None and not is_offline:
                arguments.setdefault("resume", "allow")
            if "finish_timeout" in wandb.Settings.model_fields:  # by default the end waits for ever
                arguments.setdefault("settings", {"finish_timeout": 600.0})
            self._wandb_run = wandb.init(**{"dir": str(self.directory), **arguments})
        else:
            self._wandb_run = wandb.run
        self._wandb_run.config.update(dict(config), allow_val_change=True)
        self._wandb_run.define_metric(STEP, hidden=True)
        self._wandb_run.define_metric("*", step_metric=STEP, step_sync=True)
        if self._watch is not None and self._run is not None:
            self._wandb_run.watch(self._run.task, log=self._watch)
        return str(self._wandb_run.id)

    def _stored_until(self) -> int:
        if not self._wandb_run.offline:
            return int(self._wandb_run.summary.get(STEP, -1))
        files = self.directory.glob(f"wandb/*-{self._id}/run-{self._id}.wandb")
        return max((int(row.get(STEP, -1)) for each in files for row in read_history(each)), default=-1)

    def _send(self, record: StepRecord) -> None:
        with TemporaryDirectory() as folder:  # wandb copies the files as they are logged
            files = write_media(record, Path(folder))
            media = {name: self._media(name, value, files) for name, value in record.media.items()}
            shown = {name: each for name, each in media.items() if each is not None}
            self._wandb_run.log({STEP: record.step, **record.values, **shown})

    def _media(self, name: str, value: Media, files: Mapping[str, Path]) -> Any:
        import wandb

        if isinstance(value, Histogram):
            return wandb.Histogram(np_histogram=(list(value.counts.counts), list(value.counts.edges)))
        if isinstance(value, Table):
            return wandb.Table(columns=value.columns, data=value.rows, allow_mixed_types=True)
        if isinstance(value, Text):
            return wandb.Table(columns=["text"], data=[[value.text]])
        path = str(files[name])
        if value.kind == "file":
            self._store(files[name], _FORBIDDEN.sub("-", name), ["latest"], "file")
            return None
        if value.kind == "plotly figure":
            return wandb.Html(path, inject=False)
        return {"audio": wandb.Audio, "video": wandb.Video}.get(value.kind, wandb.Image)(path)

    def _store(self, path: Path, name: str, aliases: list[str], kind: str = "model") -> None:
        import wandb

        artifact = wandb.Artifact(f"{name}-{self._id}", type=kind, metadata=self._position(path))
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._wandb_run.log_artifact(artifact, aliases=aliases)

    def _position(self, path: Path) -> dict[str, float]:
        """Return the step and the epoch of a file, for a checkpoint also the metrics that rank it."""
        saver = self._saver()
        for each in () if saver is None else saver.manager.entries():
            if each.name == path.name:
                return {"step": each.step, "epoch": each.epoch, **each.metrics}
        if self._run is None:
            return {}
        return {"step": self._run.progress.steps, "epoch": self._run.progress.epoch}

    def _close(self, failed: bool) -> None:
        if self._watch is not None and self._run is not None:
            self._wandb_run.unwatch(self._run.task)
        if self._is_ours:
            self._wandb_run.finish(exit_code=int(failed))

    @property
    def experiment(self) -> Any:
        """The `wandb.Run`."""
        if not self._is_open:
            self.log_config({})
        return self._wandb_run
