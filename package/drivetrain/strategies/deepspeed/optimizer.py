"""The optimizer and the schedule of DeepSpeed's own configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.core.errors import ConfigError, nearest
from drivetrain.core.messages import logger
from drivetrain.strategies.deepspeed.config import DeepSpeedConfig
from drivetrain.strategies.deepspeed.ds_config import AUTO, optimizer_type
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TaskModule, overrides

_LOG = logger(__name__)


def configured(config: DeepSpeedConfig, task: nn.Module, total_steps: int | None) -> OptimizerConfig | None:
    """Return the optimizer of the sections "optimizer" and "scheduler"; None without the first.

    Args:
        config: The options.
        task: The task, which must not configure an optimizer too.
        total_steps: The run's length for schedules; None if it is not known.

    Raises:
        ConfigError: The task configures an optimizer too, or a parameter is unknown or not a number.
    """
    given = config.mapping.get("optimizer")
    scheduler = config.mapping.get("scheduler")
    if given is None:
        return None
    if isinstance(task, TaskModule) and overrides(task, "configure_optimizers"):
        raise ConfigError(
            f"{type(task).__name__}.configure_optimizers and the section 'optimizer' of DeepSpeed's"
            " configuration both choose an optimizer. Remove one of them"
        )
    options = {name: each for name, each in dict(given.get("params", {})).items() if each != AUTO}
    rate = _number(options, "lr", 1e-3)
    decay = _number(options, "weight_decay", 0.0)
    factory = _factory(optimizer_type(given), options)
    schedule = _schedule(scheduler or {}, rate, total_steps) if scheduler else "constant"
    return OptimizerConfig(factory, rate, weight_decay=decay, schedule=schedule, decay_all=True, **options)


def _number(options: dict[str, Any], name: str, default: float) -> float:
    """Remove a number from a section's parameters and return it; DeepSpeed's files may have strings."""
    value = options.pop(name, default)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"DeepSpeed's configuration has the parameter {name}={value!r}; it must be a number or 'auto'"
        ) from None


def _factory(kind: str, options: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Return torch's optimizer of a kind, and remove the options that choose among DeepSpeed's Adams."""
    decoupled = bool(options.pop("adam_w_mode", True))
    options.pop("torch_adam", None)
    if kind == "SGD":
        return torch.optim.SGD
    return torch.optim.AdamW if kind == "AdamW" or decoupled else torch.optim.Adam


def _schedule(section: Mapping[str, Any], rate: float, total: int | None) -> Callable[[int], float]:
    """Return the factor on the base rate as a function of the step, by DeepSpeed's own formulas."""
    kind = section.get("type")
    options = {name: each for name, each in dict(section.get("params", {})).items() if each != AUTO}
    steps = max(2, int(_number(options, "warmup_num_steps", 1000)))
    log = options.pop("warmup_type", "log") != "linear"
    if total is not None and steps > total:
        _LOG.warning(
            f"DeepSpeed's {kind} warms up over {steps} steps, but this run has {total}: the learning rate"
            " never reaches its full value. Give the scheduler a smaller warmup_num_steps"
        )
    length = options.pop("total_num_steps", total)
    if kind != "WarmupLR" and length is None:
        raise ConfigError(f"{kind} needs total_num_steps: the length of this run is not known")
    if kind == "WarmupCosineLR":
        low, high = _number(options, "warmup_min_ratio", 0.0), 1.0
        end = _number(options, "cos_min_ratio", 1e-4)
    else:
        low = _number(options, "warmup_min_lr", 0.0) / rate
        highest = section.get("params", {}).get("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else AUTO)
        high = 1.0 if highest == AUTO else _number({"warmup_max_lr": highest}, "warmup_max_lr", rate) / rate
        options.pop("warmup_max_lr", None)
        end = 0.0
    if options:
        allowed = ("warmup_num_steps", "warmup_type", "total_num_steps", "warmup_min_lr", "warmup_max_lr")
        name = next(iter(options))
        raise ConfigError(f"{kind} has no parameter {name!r}. {nearest(name, allowed)}")

    def factor(step: int) -> float:
        done = step - 1  # DeepSpeed moves the schedule after a step, and starts at the lowest rate
        if done < 0:
            return low if kind != "WarmupCosineLR" else 0.0
        if done < steps:
            part = math.log(done + 1) / math.log(steps) if log else done / steps
            return low + (high - low) * part
        if kind == "WarmupDecayLR":
            left = max(0.0, (length - done) / max(1.0, length - steps))
            return float(low + (high - low) * left)
        if kind == "WarmupCosineLR":
            through = min(1.0, (done - steps + 1) / max(1, length - steps))
            return max(0.0, end + (1.0 - end) * (1 + math.cos(math.pi * through)) / 2)
        return high

    return factor
