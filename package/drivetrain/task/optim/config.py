"""The user's configuration of an optimizer, checked when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.registry import Registry
from drivetrain.core.validation import check_names, check_no_class, count, flag, keywords, number
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.quantized import QUANTIZED
from drivetrain.task.optim.schedules import LENGTHS, PlateauSchedule, Schedule, make_schedule

OptimizerFactory: TypeAlias = Callable[..., Optimizer]
"""``factory(param_groups, lr=..., **options)``. A factory with an argument `module` also gets the module."""

# Every optimizer of the installed torch. LBFGS calls the loss many times per step, and the engine's step
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
        "muon": "drivetrain.task.optim.muon:muon",
        **QUANTIZED,
    },
)
"""Optimizers by name."""

_RATE = 1e-3
"""The default rate; a rate is a user's if it is not this object."""

_OWN_ARGUMENTS = frozenset({"params", "param_groups", "lr", "weight_decay", "fused", "module"})


@dataclass(frozen=True, init=False)
class OptimizerConfig:
    """An optimizer's name, rate, schedule and parameters. Checked here, built by the engine.

    ``OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True, schedule="cosine", warmup_ratio=0.05)``

    With float16 parameters an `eps` of 1e-8 would be rounded to zero and the weights NaN within a few
    steps. The default is then 1e-4; an `eps` in the options overrides it.

    Args:
        name: A row of `OPTIMIZERS`, a `torch.optim.Optimizer` class, or a factory that takes
            ``(param_groups, lr=..., **options)``. The rows are "sgd", "adam", "adamw", "adafactor", "muon"
            and every class of torch.optim by its lower-case name; with torchao also "adamw8bit", "adamw4bit"
            and "adamwfp8".
        lr: The base learning rate; 0 trains nothing. None leaves the rate to the optimizer, such as the
            Adafactor of transformers, without a schedule. None is the default for a class whose own default
            is None, if no options are given.
        weight_decay: For matrices, kernels and embeddings; biases, norms and other parameters of fewer than
            two dimensions are left out. The default is 0, even if the optimizer has another default.
        schedule: A row of `SCHEDULES`, or a function from the step's number (from 0) to the factor of `lr`.
        warmup_steps: The warm-up, with any schedule: a number of steps, or a length such as "10M tokens",
            "2 epochs" or "0.05" of the whole. With a length in tokens the schedule follows the tokens seen
            before a step, and all of its lengths are in tokens.
        warmup_ratio: The warm-up as a fraction of all steps; excludes `warmup_steps`.
        warmup_power: The power of the warm-up's ramp; 1 is a straight line.
        total_steps: The steps, or the length such as "10B tokens", over which the schedule runs. None takes
            the run's length: `max_tokens` if that is given, else its steps.
        schedule_options: The named schedule's options, such as ``{"min_ratio": 0.1}``.
        schedules: Schedules of other numbers among the optimizer's settings, each the name of a row of
            `SCHEDULES` or a function from the step's number to the factor of the number:
            ``{"weight_decay": "linear", "momentum": function}``. For a pair, such as Adam's betas, a function
            returns a factor for each: ``{"betas": lambda step: (cycle(step), 1.0)}``. They have no warm-up
            and no options, and named ones run over `total_steps` or the run.
        groups: Settings by parameter name; the first that matches wins.
        parameters: Globs on the names of the parameters to train; None trains all.
        decay_all: Whether weight decay applies to every parameter.
        decayed: The names of the parameters with weight decay, instead of the rule of `weight_decay`. A
            parameter with several names has weight decay if its first name is among them. Excludes
            `decay_all`.
        max_grad_norm: Clip the gradient's norm to this; None uses the Trainer's.
        fused: None uses torch's fused implementation if there is one, True requires it, and False disables
            it.
        **options: The optimizer's options: ``momentum=0.9``, ``betas=(0.9, 0.95)``, ``eps=1e-6``.

    Raises:
        ConfigError: A name, an option or a value that cannot work; lists what is allowed.
    """

    name: str | OptimizerFactory
    lr: float | None
    weight_decay: float
    schedule: str | Schedule
    warmup_steps: int | Every
    warmup_ratio: float
    warmup_power: float
    total_steps: int | Every | None
    schedule_options: dict[str, Any]
    schedules: dict[str, str | Schedule]
    groups: tuple[ParameterGroup, ...]
    parameters: tuple[str, ...] | None
    decay_all: bool
    decayed: tuple[str, ...] | None
    max_grad_norm: float | None
    fused: bool | None
    options: dict[str, Any]

    def __init__(
        self,
        name: str | OptimizerFactory = "adamw",
        lr: float | None = _RATE,
        *,
        weight_decay: float = 0.0,
        schedule: str | Schedule = "constant",
        warmup_steps: int | str | Every = 0,
        warmup_ratio: float = 0.0,
        warmup_power: float = 1.0,
        total_steps: int | str | Every | None = None,
        schedule_options: Mapping[str, Any] | None = None,
        schedules: Mapping[str, str | Schedule] | None = None,
        groups: ParameterGroup | Sequence[ParameterGroup] = (),
        parameters: str | Sequence[str] | None = None,
        decay_all: bool = False,
        decayed: Collection[str] | None = None,
        max_grad_norm: float | None = None,
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        patterns = (parameters,) if isinstance(parameters, str) else parameters
        clip = None if max_grad_norm is None else number("max_grad_norm", max_grad_norm, above=0)
        if lr is _RATE and not options and isinstance(name, type) and _finds_its_rate(name):
            lr = None
        values = {
            "name": name,
            "lr": None if lr is None else number("lr", lr, at_least=0),
            "weight_decay": number("weight_decay", weight_decay, at_least=0),
            "schedule": schedule,
            "warmup_steps": _warmup_steps(warmup_steps),
            "warmup_ratio": _warmup_ratio(warmup_ratio),
            "warmup_power": number("warmup_power", warmup_power, above=0),
            "total_steps": None if total_steps is None else _length("total_steps", total_steps, at_least=1),
            "schedule_options": dict(schedule_options or {}),
            "schedules": _schedules(schedules),
            "groups": (groups,) if isinstance(groups, ParameterGroup) else tuple(groups),
            "parameters": None if patterns is None else tuple(patterns),
            "decay_all": flag("decay_all", decay_all),
            "decayed": None if decayed is None else tuple(decayed),
            "max_grad_norm": clip,
            "fused": None if fused is None else flag("fused", fused),
            "options": options,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)  # the class is frozen
        _check_optimizer(self)
        _check_groups(self)
        _check_schedule(self)

    def scheduling(self, setting: str) -> OptimizerConfig:
        """Return a configuration whose schedule is that of a setting in `schedules`."""
        given = self.schedules[setting]
        if setting == "lr" or given == "reduce_on_plateau":
            remedy = "only the rate can follow a metric" if setting != "lr" else "give schedule= for the rate"
            raise ConfigError(f"OptimizerConfig(schedules={{{setting!r}: {given!r}}}): {remedy}")
        try:
            return OptimizerConfig(schedule=given, total_steps=self.total_steps)
        except ConfigError as error:
            raise ConfigError(f"OptimizerConfig(schedules={{{setting!r}: ...}}): {error}") from None

    @property
    def factory(self) -> OptimizerFactory:
        """The class or function named by `name`."""
        return OPTIMIZERS[self.name] if isinstance(self.name, str) else self.name


def _schedules(given: object) -> dict[str, str | Schedule]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    raise ConfigError(
        "OptimizerConfig(schedules=) maps settings to schedules, such as {'weight_decay': 'linear'}, not"
        f" {given!r}. The rate's is schedule="
    )


def _finds_its_rate(kind: type) -> bool:
    rate = inspect.signature(kind).parameters.get("lr")
    return rate is not None and rate.default is None


def _warmup_steps(given: object) -> int | Every:
    if isinstance(given, float) and 0 < given < 1:
        raise ConfigError(f"warmup_steps={given} is no number of steps. For a part of them give warmup_ratio")
    return _length("warmup_steps", given)


def _length(name: str, given: object, at_least: int = 0) -> int | Every:
    """Return a number of steps, or a length in steps, epochs, tokens or parts of the run."""
    if not isinstance(given, (str, Every)):
        return count(name, given, at_least=at_least)
    every = Every(given)
    if every.unit not in ("steps", "epochs", "tokens", "runs"):
        raise ConfigError(f"{name} is in steps, epochs or tokens, or a part of the run, not {given!r}")
    return int(every.amount) if every.unit == "steps" else every


def _warmup_ratio(given: object) -> float:
    if isinstance(given, int) and given > 1:
        raise ConfigError(f"warmup_ratio={given} is no part of the steps. For a number give warmup_steps")
    return number("warmup_ratio", given, at_least=0, below=1)


def optimizer_title(config: OptimizerConfig) -> str:
    """Return the optimizer's name in messages: "the optimizer 'adamw'"."""
    name = config.name
    return f"the optimizer {name if isinstance(name, str) else getattr(name, '__qualname__', repr(name))!r}"


def refuse_closure(optimizer: Any) -> None:
    """Refuse an optimizer, or its class, whose step needs a closure that evaluates the loss."""
    step = getattr(optimizer, "step", None)
    closure = inspect.signature(step).parameters.get("closure") if step is not None else None
    if closure is not None and closure.default is closure.empty:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise ConfigError(
            f"the optimizer {kind.__name__.lower()!r} cannot be used here: it evaluates the loss many times"
            " per step through a closure, and accumulation, loss scaling and clipping do not allow that."
            " Write a loop of torch's own for it"
        )


def _check_optimizer(config: OptimizerConfig) -> None:
    name = config.name
    refuse_closure(torch.optim.LBFGS if name == "lbfgs" else name)
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
    # Our arguments are among the allowed, so that a typo in one of them gets the right suggestion.
    ours = frozenset(config.__dataclass_fields__) - {"options"}
    names = (allowed - _OWN_ARGUMENTS) | ours
    check_names(optimizer_title(config), config.options, names)
    _check_switches(optimizer_title(config), config.factory, config.options)
    if "lr" not in allowed:
        raise ConfigError(
            f"{optimizer_title(config)} takes no lr: a factory is called with (param_groups, lr=..., "
            "**options)"
        )
    if config.fused and "fused" not in allowed:
        raise ConfigError(f"{optimizer_title(config)} has no fused implementation. Leave fused at None")
    if config.weight_decay and isinstance(config.factory, type) and "weight_decay" not in allowed:
        raise ConfigError(f"{optimizer_title(config)} has no weight decay. Leave weight_decay at 0")


def _check_switches(owner: str, factory: OptimizerFactory, options: Mapping[str, Any]) -> None:
    """Check that switches are True or False: the text "no" would count as True. Torch checks numbers."""
    if getattr(factory, "__module__", "").partition(".")[0] not in ("torch", "drivetrain"):
        return  # the arguments of others may allow more than their defaults show
    for name, parameter in inspect.signature(factory).parameters.items():
        if isinstance(parameter.default, bool) and name in options:
            flag(f"{name} of {owner}", options[name])


def is_dampened(config: OptimizerConfig) -> bool:
    """Return whether a first momentum of zero would give other numbers than none; see `start_momenta`."""
    return any(
        options.get("dampening") for options in (config.options, *(each.options for each in config.groups))
    )


def _check_groups(config: OptimizerConfig) -> None:
    allowed = keywords(config.factory)
    if config.decay_all and config.decayed is not None:
        raise ConfigError("decay_all and decayed exclude one another: give one of them")
    for group in config.groups:
        if not isinstance(group, ParameterGroup):
            raise ConfigError(f"groups must be ParameterGroup objects, not {group!r}")
        owner = f"{optimizer_title(config)}, in the parameter group {group.pattern!r},"
        check_names(owner, group.options, allowed and allowed - _OWN_ARGUMENTS)
        _check_switches(owner.rstrip(","), config.factory, group.options)
    if config.fused and is_dampened(config):
        raise ConfigError(
            f"{optimizer_title(config)} with fused=True and dampening cannot take a parameter's first"
            " gradient after those of others: torch's fused kernel takes the momenta of all parameters or of"
            " none. Leave fused at None, or leave out dampening"
        )
    for pattern in config.parameters or ():
        if not isinstance(pattern, str):
            raise ConfigError(f"parameters must be globs such as 'generator.*', not {pattern!r}")


def _check_schedule(config: OptimizerConfig) -> None:
    _check_warmup(config)
    for setting in config.schedules:
        config.scheduling(setting)
    schedule: object = config.schedule
    if isinstance(schedule, str):
        # Built once with a dummy length of the run: a wrong option is refused here, not in the run.
        options = config.schedule_options
        lengths = {
            name: 1
            for name in LENGTHS
            if isinstance(options.get(name), (str, Every)) and _length(name, options[name])
        }
        make_schedule(schedule, 0, 1, {**options, **lengths})
        return
    made = schedule.func if isinstance(schedule, partial) else schedule
    if isinstance(made, LRScheduler) or (isinstance(made, type) and issubclass(made, LRScheduler)):
        given = f", here the class {made.__name__}" if isinstance(made, type) else ""
        raise ConfigError(
            "schedule takes a name or a function from the step's number to a factor, not a"
            f" torch scheduler{given}. To use one, let configure_optimizers return a callable that gives"
            " (optimizer, schedule)"
        )
    check_no_class("OptimizerConfig(schedule=)", schedule)
    if isinstance(schedule, PlateauSchedule):
        raise ConfigError(
            "a plateau schedule has state, and a configuration cannot hold state: write "
            "schedule='reduce_on_plateau', schedule_options={...}"
        )
    if not callable(schedule):
        raise ConfigError(f"schedule must be a name or a function of the step's number, not {schedule!r}")
    if config.schedule_options:
        raise ConfigError("schedule_options are for named schedules; a function takes none")


def _check_warmup(config: OptimizerConfig) -> None:
    """Check that a warm-up fits the rate and the schedule."""
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps} and warmup_ratio={config.warmup_ratio} exclude one "
            "another: give one"
        )
    warms_up = bool(config.warmup_steps or config.warmup_ratio)
    if config.lr is None:
        scaled = any(each.lr_scale is not None for each in config.groups)
        if config.schedule != "constant" or warms_up or scaled:
            raise ConfigError(
                "lr=None leaves the rate to the optimizer, and a schedule, a warm-up or lr_scale multiplies a"
                " rate. Give lr, or leave them out"
            )
    if config.warmup_power != 1 and not warms_up:
        raise ConfigError(f"warmup_power={config.warmup_power:g} needs warmup_steps or warmup_ratio")
    if config.warmup_power != 1 and config.schedule == "reduce_on_plateau":
        raise ConfigError("the schedule 'reduce_on_plateau' has a linear warm-up: leave warmup_power at 1")
