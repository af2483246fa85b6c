"""Transformers' schedules, as functions from the step's number to the factor of the rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from drivetrain.core.errors import ConfigError, nearest

PLATEAU = "reduce_lr_on_plateau"
GREEDY = "greedy"

_OF_PLATEAU = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown")
_PRINTED = "verbose"


def check_schedule(name: str, lr: float, options: Mapping[str, Any]) -> None:
    """Check a schedule's name and options.

    Raises:
        ConfigError: An unknown name, options that it does not take, or a schedule that cannot be used here.
    """
    names = [each.value for each in SchedulerType]
    if name not in names:
        raise ConfigError(f"lr_scheduler_type={name!r} is unknown. {nearest(name, names)}")
    if name == GREEDY:
        _check_greedy(lr, options)
    elif name == PLATEAU:
        plateau_options(lr, options, metric="validation/loss", mode="min")
    else:
        schedule_function(name, lr, 1, 1000, options)


def _check_greedy(lr: float, options: Mapping[str, Any]) -> None:
    groups = max((len(each) for each in options.values() if isinstance(each, (list, tuple))), default=1)
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(()))]} for _ in range(groups)], lr=lr)
    try:
        made: Any = get_scheduler(GREEDY, optimizer, scheduler_specific_kwargs=dict(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_kwargs={dict(options)!r} with {GREEDY!r}: {error}") from error
    lowest, highest = max(made.min_lrs), min(made.max_lrs)
    if not lowest <= lr <= highest:
        raise ConfigError(
            f"lr_scheduler_type='greedy' moves the rate between min_lr={lowest:g} and max_lr={highest:g}, and"
            f" learning_rate={lr:g} is not between them, so that its first move would replace it. Give"
            " lr_scheduler_kwargs={'min_lr': ..., 'max_lr': ...} around it. 'reduce_lr_on_plateau' begins at"
            " learning_rate and lowers it"
        )


def schedule_function(
    name: str, lr: float, warmup: float, total: int | None, options: Mapping[str, Any]
) -> Callable[[int], float]:
    """Return transformers' own function of a schedule. Most begin at 0, and so does the first rate.

    Args:
        name: A `SchedulerType` that knows no metric.
        lr: The base learning rate; some options are rates.
        warmup: Steps of the warm-up, or, below 1, their share of all.
        total: All steps of the run, or None if unknown.
        options: `lr_scheduler_kwargs`.

    Raises:
        ConfigError: Options that the schedule does not take, or an unknown length that it needs.
    """
    if total is None and (0 < warmup < 1 or name not in ("constant", "constant_with_warmup", "inverse_sqrt")):
        raise ConfigError(
            f"lr_scheduler_type={name!r} with warmup_steps={warmup} must know the number of steps in all,"
            " and the length of the run is not known. Give max_steps"
        )
    steps = int(warmup) if warmup >= 1 else math.ceil((total or 0) * warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    try:
        made = get_scheduler(name, optimizer, steps, total, dict(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_kwargs={dict(options)!r} with {name!r}: {error}") from error
    function: Callable[[int], float] = made.lr_lambdas[0]
    return function


def plateau_options(lr: float, options: Mapping[str, Any], metric: str, mode: str) -> dict[str, Any]:
    """Return the options of our schedule "reduce_on_plateau" for those of torch's ReduceLROnPlateau.

    Args:
        lr: The base learning rate.
        options: `lr_scheduler_kwargs`.
        metric: The metric that the schedule monitors.
        mode: The mode, if the options have none.

    Raises:
        ConfigError: An option that there is not.
    """
    made: dict[str, Any] = {"metric": metric, "mode": mode}
    for name, value in options.items():
        if name in _OF_PLATEAU:
            made[name] = value
        elif name == "min_lr" and isinstance(value, (int, float)):
            made["min_ratio"] = value / lr
        elif name != _PRINTED:
            raise ConfigError(
                f"lr_scheduler_kwargs={{{name!r}: {value!r}}} with {PLATEAU!r}:"
                f" {nearest(name, [*_OF_PLATEAU, 'min_lr'])}"
            )
    return made
