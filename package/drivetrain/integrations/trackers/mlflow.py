"""MLflow, and Azure Machine Learning, which speaks MLflow's protocol."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

from drivetrain.core.errors import ConfigError, without_secrets
from drivetrain.core.messages import logger
from drivetrain.core.types import Json
from drivetrain.core.validation import by_name
from drivetrain.integrations.trackers.base import Artifacts, StepRecord, Tracker, check_server, write_media
from drivetrain.loggers.files import flat
from drivetrain.loggers.media import Kind

if TYPE_CHECKING:
    from mlflow import MlflowClient

_LOG = logger(__name__)

T = TypeVar("T")

_METRICS, _PARAMETERS = 1000, 100
"""The most entries of one request."""

_FORBIDDEN = re.compile(r"[^\w\-. /:]", re.ASCII)
"""Characters that no name may have in MLflow."""


class MLflowTracker(Tracker):
    """The base of the loggers that use MLflow's client. The arguments are those of `MLflowLogger`.

    Attributes:
        longest: The most characters of a parameter's value.
    """

    package = "mlflow"
    waits = True
    takes: ClassVar[frozenset[Kind]] = frozenset(
        {"audio", "figure", "file", "image", "plotly figure", "table", "text", "video"}
    )
    longest: ClassVar[int] = 6000

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        nested: bool = False,
        tags: Mapping[str, str] | None = None,
        id: str | None = None,
        artifacts: Artifacts = "none",
        register: str | None = None,
    ) -> None:
        super().__init__(directory, artifacts=artifacts)
        if register is not None and (not isinstance(register, str) or not register or "/" in register):
            raise ConfigError(
                f"register must be the name of a model in MLflow's registry, without '/', not {register!r}"
            )
        self._model_name = register
        self._address = tracking_uri
        self._experiment = experiment
        self._name = run_name
        self._nested = nested
        self._tags = dict(tags or {})
        self._given_id = id
        self._client: MlflowClient | None = None
        self._monitor: Any = None
        self._is_ours = False

    def _open(self, resumed: str | None, config: Mapping[str, Json]) -> str:
        import mlflow

        self._address = self._address or mlflow.get_tracking_uri()
        self._check_address()
        self._check_answers()
        self._client = mlflow.MlflowClient(self._address)
        active = mlflow.active_run()
        theirs = os.environ.get("MLFLOW_RUN_ID") if active is None else active.info.run_id
        self._is_ours = theirs is None or self._nested
        run_id = (resumed or self._given_id) if self._is_ours else theirs
        if run_id is None:
            run_id = self._create(theirs, config)
        elif self._is_ours:
            self._client.update_run(run_id, status="RUNNING")
        self._log_config(run_id, config)
        if self._is_ours:
            self._measure(run_id)
        return run_id

    def _check_address(self) -> None:
        """Check the address before anything is sent there."""

    def _check_answers(self) -> None:
        """Check that a server answers. MLflow's client alone would try again for minutes."""
        if str(self._address).startswith(("http:", "https:")):
            check_server(f"{self._address}/health")

    def _create(self, parent: str | None, config: Mapping[str, Json]) -> str:
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_PARENT_RUN_ID

        client = self.experiment
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        # As mlflow.start_run has them: the user, the program and the commit of the folder that it lies in.
        about = {name: without_secrets(str(each)) for name, each in resolve_tags().items()}
        if (commit := dict(flat(dict(config))).get("run.git.commit")) is not None:  # of the working directory
            about.setdefault(MLFLOW_GIT_COMMIT, str(commit))
        tags = about | self._tags
        if self._nested and parent:
            tags[MLFLOW_PARENT_RUN_ID] = parent
        run = client.create_run(experiment, tags=tags, run_name=self._name or self._run_name)
        return str(run.info.run_id)

    def _measure(self, run_id: str) -> None:
        """Begin measurements of the machine, where MLflow's own setting asks for them."""
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

        if not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            return
        try:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(run_id, resume_logging=True, tracking_uri=self._address)
            self._monitor.start()
        except (ImportError, TypeError) as error:
            _LOG.warning(f"{self.title} measures the machine with psutil and mlflow 3.5 or later: {error}")

    def _log_config(self, run_id: str, config: Mapping[str, Json]) -> None:
        """Store the configuration as parameters, and whole as an artifact.

        A parameter cannot be changed: one that a resume has changed is a tag.
        """
        from mlflow.entities import Param, RunTag

        client = self.experiment
        before = client.get_run(run_id).data.params
        values = {_name(name): _cut(str(value), self.longest) for name, value in flat(dict(config))}
        new = [Param(name, value) for name, value in values.items() if name not in before]
        for some in _parts(new, _PARAMETERS):
            client.log_batch(run_id, params=some)
        changed = {name: value for name, value in values.items() if before.get(name, value) != value}
        for some in _parts(list(changed.items()), _PARAMETERS):
            client.log_batch(run_id, tags=[RunTag(f"changed.{name}", value) for name, value in some])
        client.log_dict(run_id, dict(config), "config.json")

    def _stored_until(self) -> int:
        client, run_id = self.experiment, str(self._id)
        # Measurements of the machine have steps of their own.
        names = [each for each in client.get_run(run_id).data.metrics if not each.startswith("system/")]
        return max(
            (each.step for name in names for each in client.get_metric_history(run_id, name)), default=-1
        )

    def _send(self, record: StepRecord) -> None:
        from mlflow.entities import Metric

        # A metric with the same time, step and value is stored once, so that sending again doubles nothing.
        at = int(record.time * 1000)
        metrics = [Metric(_name(name), value, at, record.step) for name, value in record.values.items()]
        for some in _parts(metrics, _METRICS):
            self.experiment.log_batch(str(self._id), metrics=some)
        if record.media:  # a file that is sent again replaces itself
            with TemporaryDirectory() as folder:
                write_media(record, Path(folder))
                self.experiment.log_artifacts(str(self._id), folder)

    def _store(self, path: Path, name: str, aliases: list[str]) -> None:
        self._check_answers()
        client, run_id = self.experiment, str(self._id)
        if path.is_dir():
            client.log_artifacts(run_id, str(path), f"{name}s/{path.name}")
        else:
            client.log_artifact(run_id, str(path), name)
        for alias in {*aliases} & {"best", "latest"}:
            client.set_tag(run_id, f"{name}.{alias}", path.name)

    def _close(self, failed: bool) -> None:
        if self._model_name is not None and not failed:
            self._register(self._model_name)
        if self._is_ours:
            self._check_answers()
            self.experiment.set_terminated(str(self._id), "FAILED" if failed else "FINISHED")
            if self._monitor is not None:
                self._monitor.finish()
                self._monitor = None

    def _register(self, name: str) -> None:
        from drivetrain.integrations.trackers.mlflow_model import register_model

        run = self._run
        if run is None or run.nonfinite.diverged is not None:
            return
        try:
            self._check_answers()
            saver = self._saver()
            weights = None if saver is None else saver.weights
            register_model(self.experiment, str(self._id), name, run, weights)
        except Exception as error:
            _LOG.warning(f"{self.title} has not registered the model {name!r}: {error}")

    @property
    def experiment(self) -> Any:
        """The `mlflow.MlflowClient`; `run_id` says which run is this one's."""
        if self._client is None:
            self.log_config({})
        return self._client

    @property
    def run_id(self) -> str | None:
        """The id of MLflow's run; None before the fit."""
        return self._id


def _parts(entries: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    return (entries[start : start + most] for start in range(0, len(entries), most))


def _name(name: str) -> str:
    return _FORBIDDEN.sub("_", name)[:250]


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[: most - 3]}..."


@by_name
@final
class MLflowLogger(MLflowTracker):
    """Sends values and the configuration to MLflow, and checkpoints by choice.

    A run that the program has opened by `mlflow.start_run`, or that `MLFLOW_RUN_ID` names, is used, and stays
    open afterwards. A thread sends, because MLflow's client waits for its server. Images and the
    like are artifacts under the name of the value: ``<name>/step-<step>.png``.

    As with `mlflow.start_run`, tags have the user, the program, and Git's commit, branch and remote, and
    `mlflow.enable_system_metrics_logging()` adds measurements of the machine, which need psutil.

    Args:
        directory: The folder for values that could not be sent. Default: the run directory.
        tracking_uri: The server's address, or that of a database. Default: MLflow's own choice, such as
            `MLFLOW_TRACKING_URI`.
        experiment: The experiment's name. A missing experiment is made. Default: `MLFLOW_EXPERIMENT_NAME`, or
            "Default".
        run_name: The run's name. Default: the name of the run directory.
        nested: Whether the run is a child of the one that the program has opened.
        tags: Tags of the run.
        id: The id of a run to continue. A resumed fit has it from the checkpoint.
        artifacts: "all" stores each checkpoint and the finished weights as artifacts, "best" the best
            checkpoint and the finished weights.
        register: A name in MLflow's registry. The finished task becomes a version of this model, with a
            signature; `mlflow.pytorch.load_model` loads it. Default: none.

    Raises:
        MissingDependencyError: mlflow is not installed.
        ConfigError: `register` is no name.
    """

    title = "MLflow"
    extra = "mlflow"
    advice = (
        "Check MLFLOW_TRACKING_URI or MLflowLogger(tracking_uri=...), and MLFLOW_TRACKING_TOKEN; or write to"
        " a local database: tracking_uri='sqlite:///mlflow.db'"
    )


@by_name
@final
class AzureMLLogger(MLflowTracker):
    """Sends values and the configuration to Azure Machine Learning, through MLflow.

    A job of Azure sets the address and the run in its environment. azureml-core, the retired SDK, is not
    used.

    Args:
        directory: As for `MLflowLogger`, like the other arguments.
        tracking_uri: Default: `MLFLOW_TRACKING_URI`, which must be set.
        experiment: The experiment's name.
        run_name: The run's name.
        nested: Whether the run is a child of the job's.
        tags: Tags of the run.
        id: The id of a run to continue.
        artifacts: The checkpoints that are stored.
        register: The name of the model in the registry.

    Raises:
        MissingDependencyError: mlflow is not installed.
    """

    title = "Azure ML"
    extra = "azureml"
    advice = (
        "Outside a job of Azure, log in by `az login`, and set MLFLOW_TRACKING_URI to the address that"
        " `az ml workspace show --query mlflow_tracking_uri` prints"
    )
    longest = 500

    def _check_address(self) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI") and str(self._address).startswith(
            ("sqlite:", "file:", "/")
        ):
            raise ConfigError(f"Azure ML: no address of a workspace is set. {self.advice}")
