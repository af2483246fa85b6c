"""The names of loggers, and the loggers of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.registry import Registry
from drivetrain.core.synonyms import foreign
from drivetrain.core.types import Logger

__all__ = ["LOGGERS", "Logger", "LoggerSpec", "build_loggers", "check_loggers"]

if TYPE_CHECKING:
    from drivetrain.loggers.media import Kind

LoggerSpec: TypeAlias = str | Logger | Sequence[str | Logger]
"""The argument of `Trainer(loggers=...)`: a name, a logger, or several of either."""

LOGGERS: Registry[Callable[[Path], Logger]] = Registry(
    "logger",
    {
        "tensorboard": "drivetrain.integrations.tensorboard.logger:TensorBoardLogger",
        "csv": "drivetrain.loggers.csv:CSVLogger",
        "jsonl": "drivetrain.loggers.jsonl:JSONLinesLogger",
        "aim": "drivetrain.integrations.trackers.aim:AimLogger",
        "azureml": "drivetrain.integrations.trackers.mlflow:AzureMLLogger",
        "clearml": "drivetrain.integrations.trackers.clearml:ClearMLLogger",
        "comet": "drivetrain.integrations.trackers.comet:CometLogger",
        "dvclive": "drivetrain.integrations.trackers.dvclive:DVCLiveLogger",
        "mlflow": "drivetrain.integrations.trackers.mlflow:MLflowLogger",
        "neptune": "drivetrain.integrations.trackers.neptune:NeptuneLogger",
        "swanlab": "drivetrain.integrations.trackers.swanlab:SwanLabLogger",
        "trackio": "drivetrain.integrations.trackers.trackio:TrackioLogger",
        "wandb": "drivetrain.integrations.trackers.wandb:WandbLogger",
    },
)
"""Loggers by name; each is called with the run's directory."""


def check_loggers(spec: LoggerSpec) -> list[str | Logger]:
    """Return the names and loggers in `spec` as a list, without making anything.

    Raises:
        ConfigError: A name is unknown (the error gives the nearest) or given twice, or an object is not a
            logger.
    """
    specs = [spec] if isinstance(spec, (str, Logger)) or not isinstance(spec, Sequence) else list(spec)
    names = [each for each in specs if isinstance(each, str)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"the logger {twice[0]!r} is given twice, for the same file. Give it once")
    for each in specs:
        if isinstance(each, str):
            LOGGERS.check(each)
        # A class has the three methods too, so checking the protocol alone would accept it.
        elif not isinstance(each, Logger) or isinstance(each, type):
            given = foreign(each) or f"{each!r} is no logger."
            raise ConfigError(
                f"{given} Give a name ({', '.join(map(repr, LOGGERS))}) or an object with log_metrics("
                "metrics, step), log_config(config) and close()"
            )
        elif hasattr(each, "takes"):
            _check_takes(each)
    return specs


def _check_takes(logger: Any) -> None:
    from drivetrain.loggers.media import Kind

    name = type(logger).__name__
    if isinstance(logger.takes, str) or not isinstance(logger.takes, Collection):
        raise ConfigError(f"{name}.takes must be a set of kinds, such as {{'image'}}, not {logger.takes!r}")
    for kind in logger.takes:
        if kind not in get_args(Kind):
            raise ConfigError(f"{name}.takes: unknown kind {kind!r}. {nearest(str(kind), get_args(Kind))}")
    if not callable(getattr(logger, "log_media", None)):
        raise ConfigError(f"{name} has takes={logger.takes!r}, and no method log_media(values, step)")


def takes(spec: str | Logger, kind: Kind) -> bool:
    """Return whether a logger, or the one that a name stands for, takes values of a kind."""
    made = LOGGERS[spec] if isinstance(spec, str) else spec
    # The logger that a function makes is not known before.
    return kind in getattr(made, "takes", ()) or (isinstance(spec, str) and not isinstance(made, type))


def build_loggers(spec: LoggerSpec, run_dir: Path | None) -> list[Logger]:
    """Return the loggers that `spec` asks for, in its order. No file is made before something is logged.

    Args:
        spec: A name, a logger, or a sequence of either, which may be empty.
        run_dir: Where named loggers write. None is enough if `spec` has no names.

    Raises:
        ConfigError: As for `check_loggers`, or a name is given without a `run_dir`.
    """
    return [_build(each, run_dir) for each in check_loggers(spec)]


def _build(spec: str | Logger, run_dir: Path | None) -> Logger:
    if not isinstance(spec, str):
        return spec
    if run_dir is None:
        raise ConfigError(f"the logger {spec!r} needs a directory; give the Trainer a run_dir")
    return LOGGERS[spec](run_dir)
