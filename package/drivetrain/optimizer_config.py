"""What a user says about an optimizer, checked when it is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.errors import ConfigError
from drivetrain.options import check_names, count, flag, keywords, number
from drivetrain.parameter_groups import ParameterGroup
from drivetrain.quantized_optimizers import QUANTIZED
from drivetrain.registry import Registry
from drivetrain.schedules import PlateauSchedule, Schedule, make_schedule

OptimizerFactory: TypeAlias = Callable[..., Optimizer]
"""``factory(param_groups, lr=..., **options)``. One that names an argument `module` is given the module."""

# Every optimizer of the installed torch. LBFGS calls the loss many times per update, and the engine's update
# has accumulation, scaling and clipping between the loss and the step, so there is no closure to give it.
# Ours is a Muon for whole networks; torch's takes matrices only, and is still available as the class.
OPTIMIZERS: Registry[OptimizerFactory] = Registry(
    "optimizer",
    {
        **{
            name.lower(): each
            for name, each in vars(torch.optim).items()
            if isinstance(each, type) and issubclass(each, Optimizer) and name not in ("Optimizer", "LBFGS")
        },
        "muon": "drivetrain.muon:muon",
        **QUANTIZED,
    },
)

_OWN_ARGUMENTS = frozenset({"params", "param_groups", "lr", "weight_decay", "fused", "module"})


@dataclass(frozen=True, init=False)
class OptimizerConfig:
    """Which optimizer trains which parameters, at which rate; checked here, built by the engine.

    ``OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True, schedule="cosine", warmup_ratio=0.05)``

    With float16 parameters an `eps` of 1e-8 would be zero and the weights NaN within a few updates: unless
    the options give one, it is then 1e-4.

    Args:
        name: A row of `OPTIMIZERS` ("sgd", "adam", "adamw", "adafactor", "muon", every class of torch.optim
            by its lower-case name, and with torchao "adamw8bit", "adamw4bit" and "adamwfp8"), a
            `torch.optim.Optimizer` class, or a factory taking ``(param_groups, lr=..., **options)``.
        lr: The base learning rate.
        weight_decay: For matrices, kernels and embeddings; biases, norms and other parameters of fewer than
            two dimensions are left out. 0 by default whatever the optimizer's own default is.
        schedule: A row of `SCHEDULES`, or a function from the update's number (from 0) to the factor of `lr`.
        warmup_steps: Updates of the linear warm-up, with any schedule.
        warmup_ratio: The warm-up as a fraction of all updates; excludes `warmup_steps`.
        total_steps: Updates over which the schedule runs, in place of the run's length.
        schedule_options: The named schedule's options, such as ``{"min_ratio": 0.1}``.
        groups: Settings by parameter name; the first that matches wins.
        parameters: Globs on the names of the parameters to train; None for all.
        decay_all: Whether weight decay spares nothing.
        max_grad_norm: Clip the gradient's norm to this; None for the Trainer's.
        fused: None for torch's fused implementation where there is one, True to insist, False to go without.
        **options: The optimizer's own: ``momentum=0.9``, ``betas=(0.9, 0.95)``, ``eps=1e-6``.

    Raises:
        ConfigError: A name, an option or a value that cannot work; says what can.
    """

    name: str | OptimizerFactory
    lr: float
    weight_decay: float
    schedule: str | Schedule
    warmup_steps: int
    warmup_ratio: float
    total_steps: int | None
    schedule_options: dict[str, Any]
    groups: tuple[ParameterGroup, ...]
    parameters: tuple[str, ...] | None
    decay_all: bool
    max_grad_norm: float | None
    fused: bool | None
    options: dict[str, Any]

    def __init__(
        self,
        name: str | OptimizerFactory = "adamw",
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.0,
        schedule: str | Schedule = "constant",
        warmup_steps: int = 0,
        warmup_ratio: float = 0.0,
        total_steps: int | None = None,
        schedule_options: Mapping[str, Any] | None = None,
        groups: ParameterGroup | Sequence[ParameterGroup] = (),
        parameters: str | Sequence[str] | None = None,
        decay_all: bool = False,
        max_grad_norm: float | None = None,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        patterns = (parameters,) if isinstance(parameters, str) else parameters
        clip = None if max_grad_norm is None else number("max_grad_norm", max_grad_norm, above=0)
        values = {
            "name": name,
            "lr": number("lr", lr, above=0),
            "weight_decay": number("weight_decay", weight_decay, at_least=0),
            "schedule": schedule,
            "warmup_steps": count("warmup_steps", warmup_steps),
            "warmup_ratio": number("warmup_ratio", warmup_ratio, at_least=0, below=1),
            "total_steps": None if total_steps is None else count("total_steps", total_steps, at_least=1),
            "schedule_options": dict(schedule_options or {}),
            "groups": (groups,) if isinstance(groups, ParameterGroup) else tuple(groups),
            "parameters": None if patterns is None else tuple(patterns),
            "decay_all": flag("decay_all", decay_all),
            "max_grad_norm": clip,
            "fused": None if fused is None else flag("fused", fused),
            "options": options,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)  # the class is frozen
        _check_optimizer(self)
        _check_groups(self)
        _check_schedule(self)

    @property
    def factory(self) -> OptimizerFactory:
        """What builds the optimizer: the class or function that `name` stands for."""
        return OPTIMIZERS[self.name] if isinstance(self.name, str) else self.name


def optimizer_title(config: OptimizerConfig) -> str:
    """How messages call the optimizer: "the optimizer 'adamw'"."""
    name = config.name
    return f"the optimizer {name if isinstance(name, str) else getattr(name, '__qualname__', repr(name))!r}"


def _check_optimizer(config: OptimizerConfig) -> None:
    name = config.name
    if name in ("lbfgs", torch.optim.LBFGS):
        raise ConfigError(
            "the optimizer 'lbfgs' cannot be used here: it evaluates the loss many times per update through "
            "a closure, which accumulation, loss scaling and clipping do not allow. Write your own loop for "
            "it"
        )
    if isinstance(name, Optimizer):
        raise ConfigError(
            f"OptimizerConfig takes an optimizer's name or class, not a finished {type(name).__name__}: it "
            "is built when the parameters are on their device"
        )
    if not isinstance(name, str) and not callable(name):
        raise ConfigError(f"the optimizer must be a name, a class or a factory, not {name!r}")
    allowed = keywords(config.factory)
    if allowed is None:
        return
    # Our own arguments stand among the allowed, so that a slip in one of them is told the right name.
    ours = frozenset(config.__dataclass_fields__) - {"options"}
    names = (allowed - _OWN_ARGUMENTS) | ours
    check_names(optimizer_title(config), config.options, names)
    if "lr" not in allowed:
        raise ConfigError(
            f"{optimizer_title(config)} takes no lr: a factory is called with (param_groups, lr=..., "
            "**options)"
        )
    if config.fused and "fused" not in allowed:
        raise ConfigError(f"{optimizer_title(config)} has no fused implementation. Leave fused at None")
    if config.weight_decay and isinstance(config.factory, type) and "weight_decay" not in allowed:
        raise ConfigError(f"{optimizer_title(config)} has no weight decay. Leave weight_decay at 0")


def _check_groups(config: OptimizerConfig) -> None:
    allowed = keywords(config.factory)
    for group in config.groups:
        if not isinstance(group, ParameterGroup):
            raise ConfigError(f"groups must be ParameterGroup objects, not {group!r}")
        owner = f"{optimizer_title(config)}, in the parameter group {group.pattern!r},"
        check_names(owner, group.options, allowed and allowed - _OWN_ARGUMENTS)
    for pattern in config.parameters or ():
        if not isinstance(pattern, str):
            raise ConfigError(f"parameters must be globs such as 'generator.*', not {pattern!r}")


def _check_schedule(config: OptimizerConfig) -> None:
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} exclude one "
            "another: give one"
        )
    schedule: object = config.schedule
    if isinstance(schedule, str):
        # Built once with a stand-in for the run's length: a wrong option is refused here, not in the run.
        make_schedule(schedule, 0, 1, config.schedule_options)
        return
    if isinstance(schedule, LRScheduler) or (
        isinstance(schedule, type) and issubclass(schedule, LRScheduler)
    ):
        raise ConfigError(
            "schedule takes a name or a function from the update's number to a factor, not a torch "
            "scheduler. To use one, let configure_optimizers return a callable that gives (optimizer, "
            "schedule)"
        )
    if isinstance(schedule, PlateauSchedule):
        raise ConfigError(
            "a plateau schedule has a state, which a configuration may not have: write "
            "schedule='reduce_on_plateau', schedule_options={...}"
        )
    if not callable(schedule):
        raise ConfigError(f"schedule must be a name or a function of the update's number, not {schedule!r}")
    if config.schedule_options:
        raise ConfigError("schedule_options are for named schedules; a function knows its own")
