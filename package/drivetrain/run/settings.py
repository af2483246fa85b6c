"""The arguments of a Trainer, with their checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import Any

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.assets import Assets
from drivetrain.core.errors import ConfigError, without_secrets
from drivetrain.core.int_schedule import IntSchedule, most
from drivetrain.core.intervals import Every, Interval
from drivetrain.core.types import Logger
from drivetrain.core.validation import check_no_class
from drivetrain.engine.memory import MemoryConfig, check_memory
from drivetrain.loggers.base import check_loggers
from drivetrain.run.preemption import PreemptionConfig, as_preemption
from drivetrain.run.setting_checks import CHECKS, check_micro_batch
from drivetrain.strategies import SharedSettings, Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.transforms.compile import CompileConfig, as_compile, check_compile, makes_graphs

_OF_EACH_RANK = (
    "strategy",
    "devices",
    "num_nodes",
    "deterministic",
    "batch_size",
    "num_workers",
    "collate",
    "group_by_length",
    "evaluation_batch_size",
    "assets",
    "run_dir",
    "run_name",
    "loggers",
    "progress_bar",
    "callbacks",
    "on_nonfinite",
    "hang_timeout",
)
"""The settings that may differ between ranks. All others affect what a rank does and when."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunSettings:
    """The arguments of a Trainer, which documents them. Checked when made, and never changed.

    Raises:
        ConfigError: A value that is not allowed; says what is.
        StrategyError: A strategy, number of devices or precision that cannot run here.
    """

    max_epochs: float | None = None
    max_steps: int | None = None
    max_time: str | float | timedelta | None = None
    max_tokens: int | str | Every | None = None
    min_steps: int | None = None
    dry_run: bool | int | str | None = None
    strategy: str | Strategy | StrategyConfig = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    compile: bool | Mapping[str, Any] | CompileConfig = False
    memory: Mapping[str, Any] | MemoryConfig | None = None
    precision: str | int | Precision = "auto"
    seed: int = 0
    data_seed: int | None = None
    deterministic: bool = False
    gradient_accumulation_steps: int | str | Every | Mapping[Any, int] = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    micro_batch: int | str | None = None
    batch_size: int | Mapping[Any, int] | None = None
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    group_by_length: str | Callable[[Any], int] | None = None
    limit_train_batches: int | float | None = None
    on_bad_batch: str = "raise"
    validate_every: Interval | None = "1 epoch"
    validate_from: Interval | None = None
    evaluation_batch_size: int | None = None
    limit_validation_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    sanity_validation: int | str | None = "auto"
    checkpoint: bool | str | CheckpointConfig | Sequence[CheckpointConfig] = True
    assets: Assets = ()
    run_dir: str | os.PathLike[str] | None = None
    run_name: str | None = None
    loggers: str | Logger | Sequence[str | Logger] = ("tensorboard", "csv")
    log_every: Interval | None = "auto"
    log_first_step: bool = False
    train_metrics: bool = True
    progress_bar: bool | str = True
    callbacks: Sequence[Any] = ()
    on_nonfinite: str = "raise"
    on_save_error: str = "raise"
    hang_timeout: str | float | timedelta | None = 600.0
    preemption: bool | Mapping[str, Any] | PreemptionConfig = True

    def __post_init__(self) -> None:
        """Check every argument, and normalise intervals, so that an error comes now rather than later."""
        for each in dataclasses.fields(self):
            if each.name not in ("collate", "group_by_length"):  # functions, which a class may be
                value = getattr(self, each.name)
                check_no_class(each.name, *(value if isinstance(value, (list, tuple)) else (value,)))
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "precision", select_precision(self.precision, strategy=self.strategy))
        as_preemption(self.preemption)
        check_loggers(self.loggers)
        _check_together(self)
        check_scheduled_numbers(self)
        strategy = self.select_strategy()
        check_compile(self.compile, strategy)
        _check_graphs(self)
        check_micro_batch(self.micro_batch, strategy)
        if self.on_nonfinite == "skip":
            instead = "Use on_nonfinite='stop', or strategy 'ddp' or 'fsdp'"
            check_supported(strategy, "skipping", "on_nonfinite='skip'", instead)
        if self.max_grad_value is not None:
            instead = "Use max_grad_norm, or strategy 'ddp' or 'fsdp'"
            check_supported(strategy, "value_clipping", "max_grad_value", instead)
        check_strategy_settings(self, strategy, self.batch_size)
        check_memory(self.memory, strategy)
        for callback in self.callbacks:
            callback.check_trainer(self, strategy)

    def select_strategy(self) -> Strategy:
        """Return the strategy that a run would use.

        Raises:
            ConfigError: An unknown name.
            StrategyError: It cannot run here.
        """
        return select_strategy(self.strategy, as_precision(self.precision), self.devices, self.num_nodes)

    def __repr__(self) -> str:
        """Return the arguments that differ from the defaults."""
        return without_secrets(brief(self, precision=select_precision("auto", strategy=self.strategy)))

    def to_json(self) -> dict[str, Any]:
        """Return all arguments for a log, objects as text."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _check_together(settings: RunSettings) -> None:
    """Check the arguments that exclude or need one another."""
    least, most = settings.min_steps, settings.max_steps
    if least is not None and most is not None and least > most:
        raise ConfigError(
            f"min_steps={least} with max_steps={most}: the fit ends before. Give at most {most}"
        )
    if settings.validate_every is None and settings.sanity_validation not in (None, "auto"):
        raise ConfigError(
            f"sanity_validation={settings.sanity_validation} with validate_every=None: a fit that never"
            " validates cannot try a validation first. Leave one of them out"
        )
    if settings.validate_every is None and settings.validate_from is not None:
        raise ConfigError("validate_from with validate_every=None: there is no validation to delay")
    if settings.max_grad_norm is not None and settings.max_grad_value is not None:
        raise ConfigError("max_grad_norm and max_grad_value are two ways to clip: give one of them")
    if settings.log_first_step and settings.log_every is None:
        raise ConfigError("log_first_step with log_every=None: give an interval, or leave log_first_step out")
    if settings.assets and settings.checkpoint is False:
        raise ConfigError(
            "Trainer(assets=) goes into checkpoints; checkpoint=False saves none. Leave one out"
        )


def check_scheduled_numbers(settings: RunSettings) -> None:
    """Check that the other arguments fit numbers that change during a run."""
    for name, schedule in scheduled_numbers(settings).items():
        if settings.group_by_length is not None:
            raise ConfigError(
                f"group_by_length puts samples of similar lengths into the same step, and {name}={schedule!r}"
                " changes how many a step has. Give one number, or"
                " DataLoader(..., sampler=drivetrain.data.LengthGroupedSampler(lengths, group_size))"
            )
        check_samples(settings, name, schedule)


def known_accumulation(settings: RunSettings) -> int | Mapping[Any, int]:
    """Return the micro-batches of a step; 1 if their number follows from the data, at the start of a fit."""
    steps = settings.gradient_accumulation_steps
    return 1 if isinstance(steps, (str, Every)) else steps


def scheduled_numbers(settings: RunSettings) -> dict[str, IntSchedule]:
    """Return the numbers that change during a run, by argument."""
    given = {name: getattr(settings, name) for name in ("gradient_accumulation_steps", "batch_size")}
    return {name: each for name, each in given.items() if isinstance(each, IntSchedule)}


def check_samples(settings: RunSettings, name: str, schedule: IntSchedule) -> None:
    """Check that the samples before each change are known beforehand, if its points count them."""
    if schedule.unit in ("samples", "tokens") and settings.on_bad_batch == "skip":
        raise ConfigError(
            f"{name}={schedule!r} changes after {schedule.unit}, and on_bad_batch='skip' leaves some out."
            " Give the points in steps or epochs, or use on_bad_batch='raise'"
        )


def same_on_all_ranks(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments that must be equal on all ranks."""
    names = (each.name for each in dataclasses.fields(RunSettings))
    return {name: getattr(settings, name) for name in names if name not in _OF_EACH_RANK}


def has_run_dir(settings: RunSettings) -> bool:
    """Return whether a fit with these settings has a run directory, given or new."""
    named = [settings.loggers] if isinstance(settings.loggers, str) else settings.loggers
    logs = isinstance(named, Sequence) and any(isinstance(each, str) for each in named)
    return settings.run_dir is not None or bool(settings.checkpoint) or logs


def plain(value: Any) -> Any:
    """Return a value in JSON's types; objects by the names of their classes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, Precision):
        return value.name
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (Every, os.PathLike)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"{type(value).__module__}.{type(value).__qualname__}"


def brief(value: Any, **usual: Any) -> str:
    """Return a setting's value as a short text; of a configuration, what differs from the defaults.

    Args:
        value: The value.
        **usual: What an option is by default, where that is not what its field says.
    """
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(brief, value))}]"
    if isinstance(value, (Every, Precision, FunctionType, os.PathLike)):
        return repr(plain(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        options = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        defaults = {each.name: each.default for each in dataclasses.fields(value)} | usual
        changed = [
            f"{name}={brief(each)}" for name, each in options.items() if plain(each) != plain(defaults[name])
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    text = repr(value)
    return f"{type(value).__name__}(...)" if text == object.__repr__(value) else text


def _check_graphs(settings: RunSettings) -> None:
    """Check that no gradients accumulate in memory of a CUDA graph, which its next replay overwrites."""
    config, steps = as_compile(settings.compile), known_accumulation(settings)
    if config is None or not makes_graphs(config):
        return
    given = f"gradient_accumulation_steps={steps}" if most(steps) > 1 else ""
    if settings.micro_batch is not None:
        given = f"micro_batch={settings.micro_batch!r}"
    if given:
        raise ConfigError(
            f"{given} with CUDA graphs (compile={settings.compile!r}): gradients are added to memory that the"
            " next micro-batch overwrites. Use mode='max-autotune-no-cudagraphs' or 'default', or one"
            " micro-batch in each step"
        )


def check_strategy_settings(settings: RunSettings, strategy: Strategy, batch_size: Any = None) -> None:
    """Give a strategy the Trainer's arguments."""
    asked = SharedSettings(
        batch_size if isinstance(batch_size, (int, Mapping)) else None,
        known_accumulation(settings),
        settings.max_grad_norm,
        strategy.world_size,
    )
    strategy.check_settings(asked, as_precision(settings.precision))
