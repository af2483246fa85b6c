"""The optimizer and schedule of transformers' Trainer, as a value that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import Adafactor
from transformers.trainer_pt_utils import get_parameter_names

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.core.errors import ConfigError, nearest
from drivetrain.integrations.transformers.arguments_table import OPTIMIZERS
from drivetrain.integrations.transformers.schedules import (
    GREEDY,
    PLATEAU,
    check_schedule,
    plateau_options,
    schedule_function,
)
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TaskModule


@dataclass(frozen=True)
class TransformersOptimizer:
    """The optimizer that transformers' Trainer would make, with its rate, schedule and decayed parameters.

    ``TransformersTask(model, optimizer=TransformersOptimizer("adamw_torch", learning_rate=2e-5))``

    The schedules are transformers' own functions of the step. Most begin at rate 0, and ours do not; see
    `OptimizerConfig` for ours. Weight decay applies to the parameters that transformers chooses: all but
    biases and norms.

    Args:
        name: A name of transformers' `optim`.
        learning_rate: The base learning rate.
        weight_decay: The weight decay.
        beta1: The first coefficient of the optimizers of Adam's kind.
        beta2: The second coefficient of these optimizers.
        eps: The number that these optimizers add to a denominator.
        options: Further options: `optim_args` as a mapping, or as "name=value, name=value".
        schedule: A name of transformers' `SchedulerType`.
        schedule_options: Options of the schedule.
        warmup_steps: Steps of the warm-up; below 1, their share of all.
        metric: What "reduce_lr_on_plateau" monitors.
        mode: "min" if less of it is better, "max" if more is; "auto" as in `PlateauSchedule`.

    Raises:
        ConfigError: A name or an option that is unknown or cannot be used here; says what to use.
    """

    name: str = "adamw_torch_fused"
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    options: Mapping[str, Any] | str | None = None
    schedule: str = "linear"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    warmup_steps: float = 0
    metric: str = "validation/loss"
    mode: str = "auto"

    def __post_init__(self) -> None:
        """Check the names and options."""
        object.__setattr__(self, "options", _as_mapping(self.options))
        object.__setattr__(self, "schedule_options", dict(self.schedule_options))
        check_schedule(self.schedule, self.learning_rate, self.schedule_options)
        self._configured(decayed=None, total=1000)

    def config(self, task: TaskModule) -> OptimizerConfig:
        """Return the configuration for a task whose fit begins.

        Raises:
            ConfigError: The schedule needs the length of the run, which is unknown, or is for scripts alone.
        """
        if self.schedule == GREEDY:
            raise ConfigError(
                "the schedule 'greedy' is for scripts of transformers' Trainer. In a task, let"
                " configure_optimizers return a function of the parameters that returns (optimizer,"
                " TorchSchedule(GreedyLR(optimizer, ...), metric='validation/loss'))"
            )
        return self._configured(decayed=decayed_parameters(task), total=task.run_length.steps)

    def _configured(self, decayed: tuple[str, ...] | None, total: int | None) -> OptimizerConfig:
        kind, options = _made(self)
        rates: dict[str, Any]
        if self.schedule == PLATEAU:
            found = plateau_options(self.learning_rate, self.schedule_options, self.metric, self.mode)
            rates = {"schedule": "reduce_on_plateau", "schedule_options": found}
        elif self.schedule == GREEDY:
            rates = {}
        else:
            rates = {
                "schedule": schedule_function(
                    self.schedule, self.learning_rate, self.warmup_steps, total, self.schedule_options
                )
            }
        return OptimizerConfig(
            kind,
            self.learning_rate,
            weight_decay=self.weight_decay,
            decayed=decayed,
            **rates,
            **options,
        )


# As in `transformers.Trainer.get_decay_parameter_names`, whose import takes seconds and brings in accelerate.
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def decayed_parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that transformers' Trainer decays."""
    known = {clean_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    chosen = map(clean_name, get_parameter_names(module, [nn.LayerNorm], list(_NOT_DECAYED)))
    return tuple(name for name in chosen if name in known)  # a bias of None has a name too


def _as_mapping(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    pairs = [each.partition("=") for each in given.replace(" ", "").split(",") if each]
    if any(not equals for _, equals, _ in pairs):
        raise ConfigError(f"optim_args={given!r} must be 'name=value, name=value'")
    return {name: value for name, _, value in pairs}


def _made(spec: TransformersOptimizer) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer, by our name or as a class, and its options.

    Raises:
        ConfigError: It cannot be used here, or does not take one of the options.
    """
    if spec.name not in OPTIMIZERS:
        raise ConfigError(f"optim={spec.name!r} is unknown. {nearest(spec.name, OPTIMIZERS)}")
    row = OPTIMIZERS[spec.name]
    if row.here is None:
        raise ConfigError(f"optim={spec.name!r}: {row.text}")
    unknown = next((name for name in _as_mapping(spec.options) if name not in row.options), None)
    if unknown is not None:
        allowed = ", ".join(row.options) or "none"
        raise ConfigError(
            f"optim_args has {unknown!r}, which {spec.name!r} does not take. Allowed: {allowed}"
        )
    options = {name: row.options[name](value) for name, value in _as_mapping(spec.options).items()}
    if row.is_adam:
        options = {"betas": (spec.beta1, spec.beta2), "eps": spec.eps, **options}
    if row.here == "adafactor":
        return Adafactor, {**row.fixed, **options}
    return row.here, {**row.fixed, **options}
