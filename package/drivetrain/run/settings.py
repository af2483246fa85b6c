"""The arguments of a Trainer, with their checks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType
from typing import Any

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.assets import Assets, checked_assets
from drivetrain.checkpoint.saving.config import as_policies
from drivetrain.core.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.core.files import check_path
from drivetrain.core.intervals import Every
from drivetrain.core.registry import is_installed
from drivetrain.core.stages import Stages, most, stages_or_number
from drivetrain.core.types import Logger
from drivetrain.core.validation import check_no_class, count, duration, flag, number, one_of
from drivetrain.engine.evaluation_precision import check_evaluation_precision
from drivetrain.engine.memory import MemoryConfig, as_memory, check_memory
from drivetrain.engine.splitting import check_micro_batch
from drivetrain.loggers.base import check_loggers
from drivetrain.run.hooks import Hooks
from drivetrain.run.nonfinite import check_on_nonfinite
from drivetrain.run.preemption import PreemptionConfig, as_preemption
from drivetrain.strategies import SharedSettings, Strategy, StrategyConfig, select_precision, select_strategy
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.transforms.compile import CompileConfig, as_compile, check_compile, makes_graphs

Interval = str | int | float | timedelta | Every
"""An interval: "500 steps", "1 epoch", "10 minutes", or a number of steps."""

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

_LONGEST_NAME = 200
"""The bytes of a run's name: with the time behind it, a directory's name may have 255."""

_LIMITS = ("limit_train_batches", "limit_validation_batches", "limit_test_batches", "limit_predict_batches")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The arguments of a Trainer, which documents them. Checked when made, and never changed.

    Raises:
        ConfigError: A value that is not allowed; says what is.
        StrategyError: A strategy, number of devices or precision that cannot run here.
    """

    max_epochs: float | None = None
    max_steps: int | None = None
    max_time: str | float | timedelta | None = None
    min_epochs: int | None = None
    min_steps: int | None = None
    dry_run: bool | int | str | None = None
    strategy: str | Strategy | StrategyConfig = "auto"
    devices: int | Sequence[int] | str = "auto"
    num_nodes: int = 1
    compile: bool | Mapping[str, Any] | CompileConfig = False
    memory: Mapping[str, Any] | MemoryConfig | None = None
    precision: str | int | Precision = "auto"
    evaluation_precision: str | int | Precision | None = None
    seed: int = 0
    data_seed: int | None = None
    deterministic: bool = False
    gradient_accumulation_steps: int | Mapping[Any, int] = 1
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
        if self.max_epochs is not None:
            epochs = number("max_epochs", self.max_epochs, above=0)
            object.__setattr__(self, "max_epochs", int(epochs) if epochs.is_integer() else epochs)
        for name in (
            "max_steps",
            "min_epochs",
            "min_steps",
            "evaluation_batch_size",
        ):
            if (given := getattr(self, name)) is not None:
                if name.endswith("_steps") and isinstance(given, str):
                    raise ConfigError(
                        f"{name} must be a whole number of steps, not {given!r}. For epochs give"
                        f" {name.replace('steps', 'epochs')}, for a time max_time"
                    )
                count(name, given, at_least=1)
        for name in ("epochs", "steps"):
            least, most = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None and most is not None and least > most:
                raise ConfigError(
                    f"min_{name}={least} with max_{name}={most}: the fit ends before. Give a min_{name} of at"
                    f" most {most}"
                )
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and not (isinstance(limit, float) and 0 < limit < 1):
                if isinstance(limit, float):
                    raise ConfigError(
                        f"{name} must be a number of batches, a fraction below 1, or None for all, not"
                        f" {limit}"
                    )
                count(name, limit, at_least=1)
        if self.sanity_validation not in (None, "auto"):
            if isinstance(self.sanity_validation, str) or self.sanity_validation < 1:
                raise ConfigError(
                    "sanity_validation must be a number of batches, 'auto', or None for no such validation,"
                    f" not {self.sanity_validation!r}"
                )
            count("sanity_validation", self.sanity_validation, at_least=1)
            if self.validate_every is None:
                raise ConfigError(
                    f"sanity_validation={self.sanity_validation} with validate_every=None: a fit that never"
                    " validates needs no check of it. Leave one of them out"
                )
        if isinstance(self.dry_run, bool):
            object.__setattr__(self, "dry_run", "batches" if self.dry_run else None)
        if self.dry_run not in (None, "batches", "overfit"):
            if isinstance(self.dry_run, str):
                raise ConfigError(
                    f"dry_run must be True, 'batches', a number of them, or 'overfit', not {self.dry_run!r}"
                )
            count("dry_run", self.dry_run, at_least=1)
        for name in ("gradient_accumulation_steps", "batch_size"):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, stages_or_number(name, given))
        check_stages(self)
        count("num_workers", self.num_workers)
        count("seed", self.seed)
        if self.data_seed is not None:
            count("data_seed", self.data_seed)
        if self.collate is not None and not callable(self.collate):
            raise ConfigError(f"collate must be a function of a list of samples, not {self.collate!r}")
        by = self.group_by_length
        if not (by is None or callable(by) or (isinstance(by, str) and by)):
            raise ConfigError(
                f"group_by_length must be the name of a column or a function of a sample, not {by!r}"
            )
        if self.max_grad_norm is not None:
            number("max_grad_norm", self.max_grad_norm, above=0)
        if self.max_grad_value is not None:
            number("max_grad_value", self.max_grad_value, above=0)
            if self.max_grad_norm is not None:
                raise ConfigError("max_grad_norm and max_grad_value are two ways to clip: give one of them")
        for name in ("max_time", "hang_timeout"):
            object.__setattr__(self, name, duration(name, getattr(self, name)))
        for name in ("validate_every", "validate_from", "log_every"):
            given = getattr(self, name)
            if given is not None and (name, given) != ("log_every", "auto"):
                try:
                    object.__setattr__(self, name, Every(given))
                except ConfigError as error:
                    also = "; 'auto' is allowed too" if name == "log_every" else ""
                    raise ConfigError(f"{name}: {error}{also}") from None
        for name in ("log_first_step", "train_metrics", "deterministic"):
            flag(name, getattr(self, name))
        if isinstance(self.progress_bar, str):
            one_of("progress_bar", self.progress_bar, ("tqdm", "rich"))
            if self.progress_bar == "rich" and not is_installed("rich"):
                raise MissingDependencyError("rich", "rich", "Trainer(progress_bar='rich')")
        else:
            flag("progress_bar", self.progress_bar)
        if self.validate_from is not None and self.validate_every is None:
            raise ConfigError("validate_from with validate_every=None: there is no validation to delay")
        if self.log_first_step and self.log_every is None:
            raise ConfigError(
                "log_first_step with log_every=None: give an interval, or leave log_first_step out"
            )
        one_of("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        one_of("on_save_error", self.on_save_error, ("raise", "warn"))
        check_run_dir(self.run_dir)
        check_run_name(self.run_name)
        chosen = select_precision(self.precision, strategy=self.strategy)
        object.__setattr__(self, "precision", chosen)
        object.__setattr__(self, "checkpoint", checkpoint_policy(self.checkpoint))
        object.__setattr__(self, "assets", checked_assets(self.assets, "Trainer(assets=)"))
        if self.assets and self.checkpoint is False:
            raise ConfigError(
                "Trainer(assets=) is stored in checkpoints, and checkpoint=False saves none. Leave one out"
            )
        object.__setattr__(self, "callbacks", checked_callbacks(self.callbacks))
        as_preemption(self.preemption)
        check_loggers(self.loggers)
        strategy = self.select_strategy()
        check_compile(self.compile, strategy)
        _check_graphs(self)
        check_micro_batch(self.micro_batch, strategy)
        check_evaluation_precision(self.evaluation_precision, strategy)
        check_on_nonfinite(self.on_nonfinite, strategy)
        if self.max_grad_value is not None and (reason := strategy.refuses("value_clipping")):
            raise StrategyError(
                f"max_grad_value with strategy {strategy.name!r}: {reason}. Use"
                " max_grad_norm, or strategy 'ddp' or 'fsdp'"
            )
        check_strategy_settings(self, strategy, self.batch_size)
        check_memory(as_memory(self.memory), strategy, self.compile)
        check_callbacks(self, strategy)

    def select_strategy(self) -> Strategy:
        """Return the strategy that a run would use.

        Raises:
            ConfigError: An unknown name.
            StrategyError: It cannot run here.
        """
        return select_strategy(self.strategy, as_precision(self.precision), self.devices, self.num_nodes)

    def to_json(self) -> dict[str, Any]:
        """Return all arguments for a log, objects as text."""
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def check_stages(settings: RunSettings) -> None:
    """Check that the other arguments fit numbers that change during a run."""
    for name, stages in stages_of(settings).items():
        if settings.group_by_length is not None:
            raise ConfigError(
                f"group_by_length puts samples of similar lengths into the same step, and {name}={stages!r}"
                " changes how many a step has. Give one number, or"
                " DataLoader(..., sampler=drivetrain.data.LengthGroupedSampler(lengths, group_size))"
            )
        check_samples(settings, name, stages)


def stages_of(settings: RunSettings) -> dict[str, Stages]:
    """Return the numbers that change during a run, by argument."""
    given = {name: getattr(settings, name) for name in ("gradient_accumulation_steps", "batch_size")}
    return {name: each for name, each in given.items() if isinstance(each, Stages)}


def check_samples(settings: RunSettings, name: str, stages: Stages) -> None:
    """Check that the samples before each stage are known beforehand, if its points count them."""
    if stages.unit == "samples" and settings.on_bad_batch == "skip":
        raise ConfigError(
            f"{name}={stages!r} changes after samples, and on_bad_batch='skip' leaves some out. Give"
            " the points in steps or epochs, or use on_bad_batch='raise'"
        )


def same_on_all_ranks(settings: RunSettings) -> dict[str, Any]:
    """Return the arguments that must be equal on all ranks."""
    names = (each.name for each in dataclasses.fields(RunSettings))
    return {name: getattr(settings, name) for name in names if name not in _OF_EACH_RANK}


def check_run_dir(spec: object) -> None:
    """Check that it is a local path, or None."""
    if not isinstance(spec, (str, os.PathLike, type(None))):
        raise ConfigError(f"run_dir must be a path, or None for a new one, not {spec!r}")
    if "://" in str(spec):
        raise ConfigError(
            f"run_dir={spec!r} is an address, and logs are written to a local directory. Keep run_dir local,"
            " and send the checkpoints there: checkpoint=CheckpointConfig(directory=...)"
        )
    if spec is not None:
        check_path(spec)


def has_run_dir(settings: RunSettings) -> bool:
    """Return whether a fit with these settings has a run directory, given or new."""
    named = [settings.loggers] if isinstance(settings.loggers, str) else settings.loggers
    logs = isinstance(named, Sequence) and any(isinstance(each, str) for each in named)
    return settings.run_dir is not None or bool(settings.checkpoint) or logs


def check_run_name(name: Any) -> None:
    """Check that a new directory may have this name, or that it is None."""
    is_text = isinstance(name, str) and name.isprintable() and len(name.encode()) <= _LONGEST_NAME
    if name is None or (is_text and name.strip(". ") and not {"/", "\\"} & {*name}):
        return
    raise ConfigError(
        f"run_name must be a text of at most {_LONGEST_NAME} bytes, without '/' and control characters, that"
        f" can name a directory, not {name!r}"
    )


def checked_callbacks(spec: Any, given_by: str = "callbacks") -> tuple[Any, ...]:
    """Return the callbacks after a check."""
    if not isinstance(spec, Iterable) or isinstance(spec, (str, Mapping)):
        raise ConfigError(
            f"{given_by} must be a sequence of callback objects, such as [EarlyStopping(...)], not {spec!r}"
        )
    callbacks = tuple(spec)
    check_no_class(given_by, *callbacks)
    Hooks(callbacks)
    return callbacks


def check_callbacks(settings: RunSettings, strategy: Strategy) -> None:
    for callback in settings.callbacks:
        callback.check_trainer(settings, strategy)


def checkpoint_policy(spec: object) -> object:
    """Return what the Trainer was given as `checkpoint` after a check; several policies as a tuple."""
    if isinstance(spec, (bool, CheckpointConfig)) or spec == "async":
        return spec
    if isinstance(spec, (list, tuple)):
        policies = as_policies(spec)
        return policies if len(policies) > 1 else policies[0]
    hint = ""
    if isinstance(spec, Mapping):
        hint = ". Options are given as CheckpointConfig(every=..., by=...)"
    elif isinstance(spec, (str, os.PathLike)):
        hint = ". A path is CheckpointConfig(directory=...); a checkpoint to go on from is fit(resume=...)"
    raise ConfigError(
        f"checkpoint must be True, False, 'async', a CheckpointConfig or a list of them, not {spec!r}{hint}"
    )


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


def _check_graphs(settings: RunSettings) -> None:
    """Check that no gradients accumulate in memory of a CUDA graph, which its next replay overwrites."""
    config, steps = as_compile(settings.compile), settings.gradient_accumulation_steps
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
        settings.gradient_accumulation_steps,
        settings.max_grad_norm,
        strategy.world_size,
    )
    strategy.check_settings(asked, as_precision(settings.precision))
