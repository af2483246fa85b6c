"""Aim."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from drivetrain.core.files import make_directory
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker
from drivetrain.loggers.media import Audio, Histogram, Kind, Media, Table, Text


@by_name
@final
class AimLogger(Tracker):
    """Writes values and the configuration to an Aim repository, and stores checkpoints by choice.

    "train/loss" is the metric "loss" with the context `{"subset": "train"}`.

    Args:
        directory: The parent of the repository ``.aim``. Default: the run directory.
        repo: A repository elsewhere: a folder, or the address of a server, such as "aim://host:53800".
        experiment: The experiment's name.
        name: The run's name. Default: the name of the run directory.
        tags: Short labels.
        id: The hash of a run to continue. A resumed fit has it from the checkpoint.
        run: An `aim.Run` of the program's, which stays open afterwards.
        artifacts: "all" stores each checkpoint and the finished weights, "best" the best checkpoint and the
            finished weights.
        artifacts_uri: Where they are stored. Default: the folder ``aim-artifacts`` in the directory.
        options: Further arguments of `aim.Run`.

    Raises:
        MissingDependencyError: aim is not installed.
    """

    title = "Aim"
    package = "aim"
    extra = "aim"
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "histogram", "image", "table", "text", "video"}
    )
    advice = "Give a repo that can be written to, or start the server by `aim server`"

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        repo: str | Path | None = None,
        experiment: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        id: str | None = None,
        run: Any = None,
        artifacts: Artifacts = "none",
        artifacts_uri: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        self._repo = repo
        self._arguments = {"experiment": experiment, "capture_terminal_logs": False, **(options or {})}
        self._name = name
        self._tags = list(tags)
        self._given_id = id
        self._given = run
        self._artifacts_uri = artifacts_uri
        self._aim_run: Any = None

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import aim

        if self._given is None:
            repository = str(self._repo or self.directory)
            if "://" not in repository:
                make_directory(repository)
            run_hash = resumed or self._given_id
            self._aim_run = aim.Run(**{"run_hash": run_hash, "repo": repository, **self._arguments})
            if name := self._name or self._run_name:
                self._aim_run.name = name
            for tag in self._tags if run_hash is None else ():
                self._aim_run.add_tag(tag)
        else:
            self._aim_run = self._given
        self._aim_run["config"] = dict(config)
        run = config.get("run")
        git = run.get("git") if isinstance(run, dict) else None
        # Where Aim shows it. Aim's own log_system_params=True would store secrets too.
        if isinstance(git, dict) and self._aim_run.get("__system_params") is None:
            about = {"branch": git["branch"], "commit": {"hash": git["commit"]}}
            self._aim_run["__system_params", "git_info"] = about
        if self.artifacts != "none":
            self._aim_run.set_artifacts_uri(
                self._artifacts_uri or f"file://{self.directory / 'aim-artifacts'}"
            )
        return str(self._aim_run.hash)

    def _stored_until(self) -> int:
        # Measurements of the machine have steps of their own.
        found = [each for each in self._aim_run.metrics() if not each.name.startswith("__")]
        return max((int(each.last_step()) for each in found), default=-1)

    def _send(self, record: StepRecord) -> None:
        media = {name: _media(each) for name, each in record.media.items()}
        for name, value in {**record.values, **media}.items():
            split, _, rest = name.rpartition("/")
            self._aim_run.track(value, rest, record.step, context={"subset": split} if split else None)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        if path.is_dir():
            self._aim_run.log_artifacts(str(path), f"{name}s/{path.name}", block=True)
        else:
            self._aim_run.log_artifact(str(path), f"{name}/{path.name}", block=True)

    def _close(self, failed: bool) -> None:
        if self._given is None:
            self._aim_run.close()

    @property
    def experiment(self) -> Any:
        """The `aim.Run`."""
        if not self._is_open:
            self.log_config({})
        return self._aim_run


def _media(value: Media) -> Any:
    import aim

    if isinstance(value, Histogram):
        ends = value.counts.edges[0], value.counts.edges[-1]
        return aim.Distribution(hist=list(value.counts.counts), bin_range=ends)
    if isinstance(value, (Text, Table)):
        return aim.Text(value.text if isinstance(value, Text) else value.markdown())
    if isinstance(value, Audio):
        return aim.Audio(value.data, rate=value.sample_rate, format="wav")
    from PIL.Image import open as open_image

    return aim.Image(open_image(io.BytesIO(value.data)))
