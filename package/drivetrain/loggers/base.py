"""From what the user names to the loggers of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from drivetrain.errors import ConfigError
from drivetrain.registry import Registry
from drivetrain.synonyms import foreign
from drivetrain.types import Logger

__all__ = ["LOGGERS", "Logger", "LoggerSpec", "build_loggers", "check_loggers"]

LoggerSpec: TypeAlias = str | Logger | Sequence[str | Logger]
"""What `Trainer(loggers=...)` takes: a name, a logger, or several of either."""

LOGGERS: Registry[Callable[[Path], Logger]] = Registry(
    "logger",
    {
        "tensorboard": "drivetrain.loggers.tensorboard:TensorBoardLogger",
        "csv": "drivetrain.loggers.csv:CSVLogger",
        "jsonl": "drivetrain.loggers.jsonl:JSONLinesLogger",
    },
)
"""Loggers by name; each is called with the run's directory."""


def check_loggers(spec: LoggerSpec) -> list[str | Logger]:
    """What `spec` asks for, one by one, without making anything.

    Raises:
        ConfigError: An unknown name (the nearest is given), a name given twice, or something that is no
            logger.
    """
    specs = [spec] if isinstance(spec, (str, Logger)) or not isinstance(spec, Sequence) else list(spec)
    names = [each for each in specs if isinstance(each, str)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"the logger {twice[0]!r} is given twice; both would write the same file. Give it once"
        )
    for each in specs:
        if isinstance(each, str):
            LOGGERS.check(each)
        # A class has the three methods too, so that the protocol's check alone would let it pass.
        elif not isinstance(each, Logger) or isinstance(each, type):
            given = foreign(each) or f"{each!r} is no logger."
            raise ConfigError(
                f"{given} Give a name ({', '.join(map(repr, LOGGERS))}) or an object with log_metrics("
                "metrics, step), log_config(config) and close()"
            )
    return specs


def build_loggers(spec: LoggerSpec, run_dir: Path | None) -> list[Logger]:
    """The loggers that `spec` asks for, in its order. No file is made before something is logged.

    Args:
        spec: A name, a logger, or a sequence of either; empty for none.
        run_dir: Where named loggers write. Only a spec without names may do without it.

    Raises:
        ConfigError: As `check_loggers`, or a name without a `run_dir`.
    """
    return [_build(each, run_dir) for each in check_loggers(spec)]


def _build(spec: str | Logger, run_dir: Path | None) -> Logger:
    if not isinstance(spec, str):
        return spec
    if run_dir is None:
        raise ConfigError(f"the logger {spec!r} needs a directory; give the Trainer a run_dir")
    return LOGGERS[spec](run_dir)
