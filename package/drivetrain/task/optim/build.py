"""Builds an optimizer and its schedule from an `OptimizerConfig`, and sets the rate of a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import mul
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.core.validation import check_names, keywords
from drivetrain.task.optim.config import OptimizerConfig, OptimizerFactory, is_dampened, optimizer_title
from drivetrain.task.optim.groups import embedding_parameters, group_titles, make_groups, select_parameters
from drivetrain.task.optim.quantized import check_quantized
from drivetrain.task.optim.schedules import LENGTHS, PlateauSchedule, Schedule, make_schedule, warmed_up
from drivetrain.task.optim.state import is_setting

# Devices with fused kernels; they are the same for all floating-point dtypes.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps"})

# Adafactor takes a norm of the whole parameter in place, and Rprop writes to elements by a mask.
_UNSHARDED = (torch.optim.Adafactor, torch.optim.Rprop)

# Half of float16's smallest step, 2**-24: an epsilon below it is rounded to zero, and 0 / 0 is NaN.
_FLOAT16_UNDERFLOW = 2.0**-25
_FLOAT16_EPS = 1e-4


def build_optimizer(
    config: OptimizerConfig, module: nn.Module, names: Collection[str] | None = None
) -> Optimizer:
    """Build the configured optimizer over the trainable parameters of a module.

    Args:
        config: The configuration.
        module: The module, with its parameters on the training device.
        names: The names of the parameters to consider; None considers all.

    Returns:
        An optimizer whose groups carry "lr" and "initial_lr", both the group's base rate.

    Raises:
        ConfigError: Nothing to train, a pattern that matches nothing, or an option that the optimizer
            refuses.
    """
    factory = config.factory
    selected = select_parameters(module, names, config.parameters)
    groups = make_groups(
        module,
        selected,
        config.groups,
        lr=config.lr,
        weight_decay=config.weight_decay,
        decay_all=config.decay_all,
        decayed=config.decayed,
    )
    allowed = keywords(factory)
    if isinstance(factory, type) and allowed is not None and "weight_decay" not in allowed:
        for group in groups:
            del group["weight_decay"]
    _set_float16_eps(groups, config)
    options = dict(config.options)
    if allowed is not None and "module" in allowed:
        options["module"] = module
    fused = _fused(config, module, [each for group in groups for each in group["params"]])
    if fused is not None:
        options["fused"] = fused
    try:
        optimizer = factory(groups, lr=config.lr, **options)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        if isinstance(error, ConfigError):
            raise
        finds = " lr=None is for an optimizer that finds its own rate." if config.lr is None else ""
        raise ConfigError(f"{optimizer_title(config)} refuses its settings: {error}.{finds}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"{optimizer_title(config)} gave a {type(optimizer).__name__}, which is no torch.optim.Optimizer"
        )
    check_quantized(optimizer)
    check_parameters(optimizer)
    remember_base_rates(optimizer)
    _remember_scheduled(optimizer, config)
    return optimizer


def _remember_scheduled(optimizer: Optimizer, config: OptimizerConfig) -> None:
    """Store the base value of each setting with a schedule as "initial_weight_decay", for example."""
    for setting in config.schedules:
        groups = [group for group in optimizer.param_groups if setting in group]
        if not groups:
            allowed = {name for group in optimizer.param_groups for name in group if is_setting(name)}
            check_names(optimizer_title(config), (setting,), allowed - {"lr", "initial_lr"}, "setting")
        values = [each for group in groups for each in numbers_of(group[setting])]
        if not all(isinstance(each, Real) and not isinstance(each, bool) for each in values):
            raise ConfigError(
                f"schedules={{{setting!r}: ...}} multiplies a number by a factor, and {setting} of"
                f" {optimizer_title(config)} is {groups[0][setting]!r}"
            )
        _check_factors(config, setting, len(numbers_of(groups[0][setting])))
        if not any(values):
            raise ConfigError(
                f"schedules={{{setting!r}: ...}} gives factors of {setting}, which is 0. Give {setting} too"
            )
        for group in groups:
            group[f"initial_{setting}"] = group[setting]


def numbers_of(setting: Any) -> Sequence[Any]:
    """Return the numbers of a setting: one, or those of a pair such as Adam's betas."""
    return setting if isinstance(setting, (tuple, list)) else (setting,)


def _check_factors(config: OptimizerConfig, setting: str, count: int) -> None:
    """Check that a schedule gives a pair a factor for each of its numbers, and a number one factor."""
    given = config.schedules[setting]
    found = 1.0 if isinstance(given, str) else given(0)
    if isinstance(found, (tuple, list)) is (count == 1) or len(numbers_of(found)) != count:
        factors = "one factor" if count == 1 else f"{count} factors, as by lambda step: (0.9, 1.0)"
        raise ConfigError(
            f"schedules={{{setting!r}: ...}} of {optimizer_title(config)} takes a function that returns"
            f" {factors}, and not {given if isinstance(given, str) else found!r}"
        )


def check_parameters(optimizer: Optimizer) -> None:
    """Check that torch can step an optimizer on its parameters, as they are sharded and lie in memory."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    parameters = [
        each for group in optimizer.param_groups for each in group["params"] if not hasattr(each, "ds_shape")
    ]
    for each in parameters:
        if any(step == 0 and size > 1 for size, step in zip(each.shape, each.stride(), strict=True)):
            raise ConfigError(
                f"a parameter of shape {tuple(each.shape)} has elements that share memory, as expand() makes"
                " them, and cannot be trained. Make the parameter of a copy, nn.Parameter(values.clone()), or"
                " of the values before expand(), and expand it in forward"
            )
        if fused and not _is_dense(each):
            raise _not_fused(f"a parameter of shape {tuple(each.shape)} has strides {each.stride()}")
    shards = sum(map(_is_sharded, parameters))
    if shards and isinstance(optimizer, _UNSHARDED):
        raise ConfigError(
            f"the optimizer {type(optimizer).__name__.lower()!r} cannot train the {shards} sharded"
            " parameters: its step has operations that torch lacks for shards. Use strategy 'ddp', or"
            " under 'fsdp' another optimizer, such as 'adamw' or 'muon'"
        )


def check_gradients(may_unfuse: bool, optimizer: Optimizer, *_: Any) -> None:
    """Check that the gradients lie in memory as their parameters do, before a fused kernel takes them.

    Gradients that backward stores do. A program that sets `grad` itself may lay them out otherwise.

    Args:
        may_unfuse: Whether to go on without the kernel if they do not.
        optimizer: The optimizer; it and the rest are what torch gives a hook of its step.
    """
    for group in optimizer.param_groups:
        gradients = ((each, each.grad) for each in group["params"] if each.grad is not None)
        other = next((grad for each, grad in gradients if not _lie_alike(grad, each)), None)
        if not group.get("fused") or other is None:
            continue
        if not may_unfuse:
            raise _not_fused(f"a gradient of shape {tuple(other.shape)} has other strides than its parameter")
        group["fused"] = None


def _not_fused(reason: str) -> ConfigError:
    return ConfigError(
        f"fused=True: {reason}, and fused kernels take each tensor for one dense block of memory. Leave fused"
        " at None, or copy with .contiguous()"
    )


def _set_float16_eps(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> None:
    """Give groups with float16 parameters an epsilon that float16 can hold, unless the user chose one."""
    try:
        argument = inspect.signature(config.factory).parameters.get("eps")
    except (TypeError, ValueError):
        return
    default = None if argument is None else argument.default
    if "eps" in config.options or not isinstance(default, float) or default >= _FLOAT16_UNDERFLOW:
        return
    for group in groups:
        if any(each.dtype == torch.float16 for each in group["params"]):
            group.setdefault("eps", _FLOAT16_EPS)


def _obstacle(factory: Any, parameters: Sequence[Tensor]) -> str:
    """Return the kind of parameters that a fused step of this optimizer does not take, or ""."""
    obstacle = next((each for each in parameters if not _can_fuse(factory, each)), None)
    if obstacle is not None:
        return f"{obstacle.dtype}"
    # torch cannot fuse a step over both kinds
    return "sharded and whole" if len({_is_sharded(each) for each in parameters}) > 1 else ""


def _fused(config: OptimizerConfig, module: nn.Module, parameters: Sequence[Tensor]) -> bool | None:
    """Return the value of `fused`; None leaves the choice to the optimizer."""
    factory = config.factory
    if "fused" not in (keywords(factory) or ()):
        return None
    if config.fused is False:
        return False
    obstacle = _obstacle(factory, parameters)
    if config.fused:
        if obstacle:
            raise ConfigError(
                f"{optimizer_title(config)} has no sound fused implementation for {obstacle} "
                f"parameters on {parameters[0].device.type}. Leave fused at None"
            )
        return True
    conflicting = any(config.options.get(name) for name in ("foreach", "differentiable"))
    # Fused Adagrad exists on fewer devices than the others, and no fused kernel takes sparse gradients.
    if factory is torch.optim.Adagrad or is_dampened(config) or conflicting or obstacle:
        return None
    if not all(map(_is_dense, parameters)):
        return None
    return True if set(parameters).isdisjoint(embedding_parameters(module, sparse=True)) else None


def _is_dense(parameter: Tensor) -> bool:
    """Return whether a parameter fills one block of memory, in any order of its dimensions."""
    return parameter.is_contiguous() or _lie_alike(torch.empty_like(parameter, device="meta"), parameter)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have their elements in the same order in memory."""
    if _is_sharded(other) or one.layout is not torch.strided:
        return _is_sharded(other)
    strides = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(first == second for size, first, second in strides if size > 1)


def _can_fuse(factory: OptimizerFactory, parameter: Tensor) -> bool:
    if not parameter.is_floating_point() or parameter.device.type not in _FUSED_DEVICES:
        return False
    kind = factory if isinstance(factory, type) else None
    # For sharded parameters (DTensors) torch implements Adam's fused step only.
    if _is_sharded(parameter) and kind not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    # On the CPU, fused SGD leaves most 16-bit weights as they are and writes garbage to their momentum,
    # without an error; seen in torch 2.13 and reported as https://github.com/pytorch/pytorch/issues/191763.
    is_sgd = kind is not None and issubclass(kind, torch.optim.SGD)
    return not (is_sgd and parameter.device.type == "cpu" and parameter.itemsize < 4)


def _is_sharded(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")  # a DTensor, whose import takes half a second


def remember_base_rates(optimizer: Optimizer) -> None:
    """Store each group's rate as its base rate, "initial_lr" (torch's convention), unless it has one."""
    for group in optimizer.param_groups:
        rate = group["lr"]
        group.setdefault("initial_lr", rate.item() if isinstance(rate, Tensor) else rate)


class ScheduleLengths(NamedTuple):
    """The lengths of a schedule in the unit that it follows.

    Attributes:
        unit: "steps" or "tokens", a count of `Progress`.
        warmup: The warm-up.
        total: The whole length, or None if it is unknown in this unit.
        options: The options of the named schedule.
    """

    unit: str
    warmup: int
    total: int | None
    options: dict[str, Any]


def schedule_lengths(
    config: OptimizerConfig, total_steps: int | None, calendar: Calendar | None = None
) -> ScheduleLengths:
    """Return the lengths of a configured schedule.

    It follows the tokens if a length is in tokens, or if none is given and tokens limit the run. It runs over
    the limit of the run that is in this unit.

    Args:
        config: The configuration.
        total_steps: Steps of the run, or None if unknown. The configuration's `total_steps` overrides it.
        calendar: The calendar of the run, for lengths in epochs and tokens.

    Raises:
        ConfigError: Lengths in steps and in tokens, or a part of a length that is unknown.
    """
    calendar, options = calendar or Calendar(), dict(config.schedule_options)
    whole = calendar.whole or (Every(total_steps) if total_steps else None)
    warmup = config.warmup_steps or (str(config.warmup_ratio) if config.warmup_ratio else None)
    given = {"warmup_steps": warmup, "total_steps": config.total_steps}
    given |= {name: options.get(name) for name in LENGTHS}
    lengths = {name: Every(each) for name, each in given.items() if each is not None}
    unit = _unit_of(config, lengths, whole)
    total = total_steps
    if unit == "tokens":
        total = int(whole.amount) if whole is not None and whole.unit == unit else None
    if "total_steps" in lengths:
        total = _amount(lengths.pop("total_steps"), unit, total, calendar)
    amounts = {name: _amount(each, unit, total, calendar) for name, each in lengths.items()}
    return ScheduleLengths(unit, amounts.pop("warmup_steps", 0), total, options | amounts)


def _unit_of(config: OptimizerConfig, lengths: Mapping[str, Every], whole: Every | None) -> str:
    """Return what a schedule follows: "steps" or "tokens"."""
    own = callable(config.schedule)
    units = {
        "tokens" if each.unit == "tokens" else "steps" for each in lengths.values() if each.unit != "runs"
    }
    units |= {"steps"} if own else set()
    if len(units) > 1:
        listed = ", ".join(f"{name}='{each}'" for name, each in lengths.items())
        raise ConfigError(
            f"a schedule follows steps or tokens, and not both: {'a function of the step, ' if own else ''}"
            f"{listed}. Give all lengths in one of them"
        )
    if units or whole is None:
        return units.pop() if units else "steps"
    # Without a length, this one has a default in steps.
    return "steps" if config.schedule == "inverse_sqrt" and not lengths else whole.unit


def _amount(every: Every, unit: str, total: int | None, calendar: Calendar) -> int:
    """Return a length of a schedule in its unit."""
    if every.unit == "runs":
        if total is None:
            raise ConfigError(
                f"{every} of a schedule, as by warmup_ratio, needs its whole length, which is not known in"
                f" {unit}. Give max_{unit} to the Trainer, total_steps to OptimizerConfig, or another length"
            )
        return math.ceil(every.amount * total - 1e-9)  # 0.1 * 30 must be 3 despite rounding
    if every.unit == "epochs" and calendar.length is None:
        raise ConfigError(f"'{every}' of a schedule need data of known length. Give a number of steps")
    return calendar.step_of(every) if every.unit == "epochs" else int(calendar.resolved(every).amount)


def build_schedule(
    config: OptimizerConfig, total_steps: int | None, calendar: Calendar | None = None
) -> Schedule | PlateauSchedule | None:
    """Return the configured schedule.

    Args:
        config: The configuration.
        total_steps: Steps of the run, or None if unknown. The configuration's `total_steps` overrides it.
        calendar: The calendar of the run, for lengths in epochs and tokens.

    Returns:
        A function from the step's number, or the tokens, to the factor of the base rate, or None when that is
        always 1.

    Raises:
        ConfigError: The schedule or a length needs what is unknown.
    """
    _, warmup, total, options = schedule_lengths(config, total_steps, calendar)
    if not isinstance(config.schedule, str):
        return warmed_up(partial(_factor_of, config.schedule), warmup, config.warmup_power)
    schedule = make_schedule(config.schedule, warmup, total, options)
    if config.warmup_power == 1 or schedule is None:
        return schedule
    return warmed_up(schedule, warmup, config.warmup_power - 1)  # its own ramp is linear


def _factor_of(schedule: Schedule, step: int) -> Any:
    """Return the factor of a user's function at a step, or its factors of a pair, or refuse them."""
    given: Any = schedule(step)
    try:
        factors = tuple(map(float, numbers_of(given)))
    except (TypeError, ValueError):
        factors = (math.nan,)
    if not all(0 <= each < math.inf for each in factors):
        raise ConfigError(
            f"the schedule {getattr(schedule, '__qualname__', schedule)} gave {given!r} at step {step}. It"
            " returns the factor of the value: a finite number, 0 or more"
        )
    return factors if isinstance(given, (tuple, list)) else factors[0]


class ScheduledSetting(NamedTuple):
    """A setting of an optimizer, other than the rate, that follows a schedule.

    Attributes:
        name: The setting, such as "weight_decay".
        unit: "steps" or "tokens"; see `ScheduleLengths`.
        factor: The factor of its base value; of a pair, such as betas, a factor for each.
        titles: The title of each group in the names of its values; see `group_titles`.
    """

    name: str
    unit: str
    factor: Schedule
    titles: Sequence[str]

    def apply(self, optimizer: Optimizer, progress: Progress) -> None:
        """Set the setting in each group that has it; called at every step."""
        factor, base = self.factor(getattr(progress, self.unit)), f"initial_{self.name}"
        for group in optimizer.param_groups:
            if base not in group:
                continue
            if isinstance(factor, (tuple, list)):
                group[self.name] = tuple(map(mul, group[base], factor))
            else:
                group[self.name] = group[base] * factor


def scheduled_settings(
    config: OptimizerConfig,
    module: nn.Module,
    optimizer: Optimizer,
    total_steps: int | None,
    calendar: Calendar | None,
) -> Iterator[ScheduledSetting]:
    """Yield the settings of `OptimizerConfig(schedules=)` with their schedules; see `build_schedule`."""
    for name in config.schedules:
        alone = config.scheduling(name)
        factor = build_schedule(alone, total_steps, calendar)
        if factor is not None:
            unit = schedule_lengths(alone, total_steps, calendar).unit
            titles = group_titles(module, optimizer, config.groups, name)
            yield ScheduledSetting(name, unit, factor, titles)


def apply_factor(optimizer: Optimizer, factor: float) -> None:
    """Set each group's rate to `factor` times its base rate, "initial_lr"; called at every step."""
    for group in optimizer.param_groups:
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate.fill_(group["initial_lr"] * factor)
        else:
            group["lr"] = group["initial_lr"] * factor
