"""The check of each argument of a Trainer by itself; `RunSettings` checks those that must fit together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from drivetrain.checkpoint import CheckpointConfig
from drivetrain.checkpoint.saving.assets import checked_assets
from drivetrain.checkpoint.saving.config import as_policies
from drivetrain.core.errors import ConfigError
from drivetrain.core.files import check_path
from drivetrain.core.int_schedule import number_or_schedule
from drivetrain.core.intervals import Every
from drivetrain.core.registry import Registry
from drivetrain.core.validation import check_no_class, count, duration, flag, number, one_of, token_count
from drivetrain.run.hooks import Hooks
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported

Check: TypeAlias = Callable[[str, Any], Any]
"""A check of an argument, by its name and value; returns the value to keep."""

BARS: Registry[Any] = Registry(
    "progress_bar", {"tqdm": "tqdm.std:tqdm", "rich": "drivetrain.integrations.rich.bar:RichBar"}
)
"""Classes of progress bars by name; `of_run()` of those that are not tqdm's returns the class for one run."""


_LONGEST_NAME = 200
"""The bytes of a run's name: with the time behind it, a directory's name may have 255."""


def _optional(check: Check) -> Check:
    """Return a check that allows None."""
    return lambda name, value: None if value is None else check(name, value)


def _positive(name: str, value: Any) -> Any:
    number(name, value, above=0)
    return value


def _epochs(name: str, value: object) -> float:
    epochs = number(name, value, above=0)
    return int(epochs) if epochs.is_integer() else epochs


def _steps(name: str, value: object) -> int:
    if isinstance(value, str):
        raise ConfigError(
            f"{name} must be a whole number of steps, not {value!r}. For epochs give max_epochs, for"
            " tokens max_tokens, and for a time max_time"
        )
    return count(name, value, at_least=1)


def _limit(name: str, value: object) -> float:
    if not isinstance(value, float):
        return count(name, value, at_least=1)
    if 0 < value < 1:
        return value
    raise ConfigError(f"{name} must be a number of batches, a fraction below 1, or None for all, not {value}")


def _sanity_validation(name: str, value: Any) -> Any:
    if value == "auto":
        return value
    if isinstance(value, str) or value < 1:
        raise ConfigError(f"{name} is a number of batches, 'auto', or None for no validation, not {value!r}")
    return count(name, value, at_least=1)


def _dry_run(name: str, value: object) -> Any:
    if isinstance(value, bool):
        return "batches" if value else None
    if value == "batches":
        return value
    if isinstance(value, str):
        raise ConfigError(
            f"{name} must be True, 'batches', or a number of them, not {value!r}. To overfit a few batches,"
            " give fit a list of them: [*itertools.islice(loader, 2)]"
        )
    return count(name, value, at_least=1)


def _accumulation(name: str, value: Any) -> Any:
    """Return a number or a schedule of micro-batches, or the tokens of a step."""
    if isinstance(value, (str, Every)):
        return Every(token_count(name, value), "tokens")
    return number_or_schedule(name, value)


def _collate(name: str, value: object) -> object:
    if callable(value):
        return value
    raise ConfigError(f"{name} must be a function of a list of samples, not {value!r}")


def _group_by_length(name: str, value: object) -> object:
    if callable(value) or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{name} must be the name of a column or a function of a sample, not {value!r}")


def _interval(name: str, value: Any) -> Every:
    try:
        return Every(value)
    except ConfigError as error:
        also = "; 'auto' is allowed too" if name == "log_every" else ""
        raise ConfigError(f"{name}: {error}{also}") from None


def _log_every(name: str, value: Any) -> Any:
    return value if value == "auto" else _interval(name, value)


def _progress_bar(name: str, value: object) -> bool | str:
    if not isinstance(value, str):
        return flag(name, value)
    BARS[value]  # raises where its package is not installed
    return value


def _run_dir(name: str, value: object) -> object:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(f"{name} must be a path, or None for a new one, not {value!r}")
    if "://" in str(value):
        raise ConfigError(
            f"{name}={value!r} is an address, and logs are written to a local directory. Keep {name} local,"
            " and send the checkpoints there: checkpoint=CheckpointConfig(directory=...)"
        )
    check_path(value)
    return value


def _run_name(name: str, value: Any) -> Any:
    is_text = isinstance(value, str) and value.isprintable() and len(value.encode()) <= _LONGEST_NAME
    if is_text and value.strip(". ") and not {"/", "\\"} & {*value}:
        return value
    raise ConfigError(
        f"{name} must be a text of at most {_LONGEST_NAME} bytes, without '/' and control characters, that"
        f" can name a directory, not {value!r}"
    )


def checked_callbacks(spec: Any, given_by: str = "callbacks") -> tuple[Any, ...]:
    """Return the callbacks after a check."""
    if not isinstance(spec, Iterable) or isinstance(spec, (str, Mapping)):
        raise ConfigError(f"{given_by} is a sequence of callbacks, such as [EarlyStopping()], not {spec!r}")
    callbacks = tuple(spec)
    check_no_class(given_by, *callbacks)
    if twice := [type(each).__name__ for each in callbacks if sum(each is other for other in callbacks) > 1]:
        raise ConfigError(f"{given_by} has one {twice[0]} twice, whose hooks would run twice. Give it once")
    Hooks(callbacks)
    return callbacks


def checkpoint_policy(spec: object) -> object:
    """Return what the Trainer was given as `checkpoint` after a check; several policies as a tuple."""
    if isinstance(spec, (bool, CheckpointConfig)) or spec == "async":
        return spec
    if isinstance(spec, (list, tuple)):
        policies = as_policies(spec)
        return policies if len(policies) > 1 else policies[0]
    raise ConfigError(
        "checkpoint must be True, False, 'async', a CheckpointConfig(every=..., by=...) or a list of them,"
        f" not {spec!r}. A path is CheckpointConfig(directory=...); a checkpoint to go on from is"
        " fit(resume=...)"
    )


CHECKS: Mapping[str, Check] = {
    "max_epochs": _optional(_epochs),
    "max_steps": _optional(_steps),
    "max_time": duration,
    "max_tokens": _optional(token_count),
    "min_steps": _optional(_steps),
    "dry_run": _optional(_dry_run),
    "seed": count,
    "data_seed": _optional(count),
    "deterministic": flag,
    "gradient_accumulation_steps": _optional(_accumulation),
    "max_grad_norm": _optional(_positive),
    "max_grad_value": _optional(_positive),
    "batch_size": _optional(number_or_schedule),
    "num_workers": count,
    "collate": _optional(_collate),
    "group_by_length": _optional(_group_by_length),
    "limit_train_batches": _optional(_limit),
    "on_bad_batch": partial(one_of, allowed=("raise", "skip")),
    "validate_every": _optional(_interval),
    "validate_from": _optional(_interval),
    "evaluation_batch_size": _optional(partial(count, at_least=1)),
    "limit_validation_batches": _optional(_limit),
    "limit_test_batches": _optional(_limit),
    "limit_predict_batches": _optional(_limit),
    "sanity_validation": _optional(_sanity_validation),
    "checkpoint": lambda _, value: checkpoint_policy(value),
    "assets": lambda _, value: checked_assets(value, "Trainer(assets=)"),
    "run_dir": _optional(_run_dir),
    "run_name": _optional(_run_name),
    "log_every": _optional(_log_every),
    "log_first_step": flag,
    "train_metrics": flag,
    "progress_bar": _progress_bar,
    "callbacks": lambda _, value: checked_callbacks(value),
    "on_nonfinite": partial(one_of, allowed=("raise", "skip", "stop")),
    "on_save_error": partial(one_of, allowed=("raise", "warn")),
    "hang_timeout": duration,
}
"""The arguments that are checked by themselves. The strategy checks the others."""


def check_outputs(strategy: Strategy, what: str) -> None:
    instead = "Return numbers from the steps, which are joined, or load the checkpoint under another strategy"
    check_supported(strategy, "outputs", what, instead)


def check_micro_batch(spec: int | str | None, strategy: Strategy) -> None:
    if spec is None:
        return
    if isinstance(spec, str) and spec != "auto":
        raise ConfigError(f"micro_batch must be 'auto', a number of samples, or None, not {spec!r}")
    if not isinstance(spec, str):
        count("micro_batch", spec, at_least=1)
    instead = "Use a smaller batch with gradient_accumulation_steps"
    check_supported(strategy, "micro_batch", f"micro_batch={spec!r}", instead)
