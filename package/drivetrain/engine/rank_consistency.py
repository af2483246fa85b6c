"""Checks that all ranks have the same configuration, before they exchange anything."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.checkpoint.weights.module_state import parameter_names
from drivetrain.core import version
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.updater import Updater
from drivetrain.strategies import Strategy
from drivetrain.task.task import TaskModule

_SAMPLED = (0, 1, 10, 100, 1000, 10_000, 100_000)
"""Schedules are compared at these steps."""

_OTHER_OPTIMIZERS = "the ranks have different optimizers, so each would train a different model"


class Compared(NamedTuple):
    """Texts that must be the same on all ranks, and what the error says if they are not."""

    found: Mapping[str, str]
    problem: str
    remedy: str
    error: type[ConfigError | StrategyError] = ConfigError


def require_same(ranks: Ranks, *compared: Compared) -> None:
    """Check that all ranks have the same texts, in this order; all call it together.

    One number is exchanged. The texts are exchanged only if that number differs.
    """
    own = [dict(each.found) for each in compared]
    if ranks.size == 1 or len(set(ranks.all_gather(zlib.crc32(repr(own).encode())))) == 1:
        return
    every = ranks.all_gather(own)
    for number, each in enumerate(compared):
        _compare(each, [texts[number] for texts in every])


def _compare(compared: Compared, every: Sequence[Mapping[str, str]]) -> None:
    for name in dict.fromkeys(name for each in every for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            holders.setdefault(each.get(name, "not there"), []).append(rank)
        if len(holders) > 1:
            listed = " and ".join(f"{text} on {_numbers(of)}" for text, of in holders.items())
            raise compared.error(f"{compared.problem}: {name} is {listed}. {compared.remedy}")
    if len({tuple(each) for each in every}) > 1:
        names = ", ".join(every[0])
        raise compared.error(f"{compared.problem}: {names} come in another order. {compared.remedy}")


def _numbers(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def check_same_call(
    settings: Mapping[str, Any], task: TaskModule, strategy: Strategy, verb: str, **arguments: Any
) -> None:
    """Check that the ranks make the same call, with the same settings, arguments and kind of task.

    Args:
        strategy: The strategy; it has been set up, and no more.

    Raises:
        ConfigError: The verb, a setting or an argument differs.
        StrategyError: A parameter or buffer differs in name, shape, dtype, whether it is trained or has
            values.
    """
    chosen = {**_options(strategy), **{name: _text(each) for name, each in settings.items()}}
    given = {name: _text(value) for name, value in arguments.items()}
    calls = "All make the same calls, in one order"
    trainers = "Give all the same; rank 0 alone writes files"
    require_same(
        strategy.ranks,
        _versions(),
        Compared({"the verb": verb}, "the ranks do different things", calls),
        Compared(chosen, "the ranks were given different Trainers", trainers),
        Compared(given, "the ranks were given different arguments", "Give all the same"),
        _task(_tensors(task)),
    )


def check_same_module(strategy: Strategy, module: nn.Module) -> None:
    """Check that the ranks prepare the same module, under the same strategy, for a loop of the user's."""
    engines = Compared(_options(strategy), "the ranks were given different Engines", "Give all the same")
    require_same(strategy.ranks, _versions(), engines, _task(_tensors(module)))


def _versions() -> Compared:
    found = {"drivetrain": version.__version__, "torch": str(torch.__version__)}
    remedy = "Install the same on all machines"
    return Compared(found, "the ranks run different versions", remedy, StrategyError)


def _task(described: Mapping[str, str]) -> Compared:
    return Compared(described, "the ranks have different tasks", "Make the same task on all", StrategyError)


def check_same_optimizers(
    task: nn.Module, updaters: Mapping[str, Updater], total_steps: int | None, ranks: Ranks
) -> None:
    """Check that the ranks made the same optimizers, because each would silently train its own model."""
    if ranks.size > 1:
        made = dict(_made(task, updaters, total_steps))
        remedy = "Let configure_optimizers give the same on all"
        require_same(ranks, Compared(made, _OTHER_OPTIMIZERS, remedy))


def check_same_optimizer(module: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Check that the ranks made the same optimizer, in a loop of the user's."""
    if ranks.size > 1:
        made = dict(_settings(module, "the optimizer", optimizer))
        require_same(ranks, Compared(made, _OTHER_OPTIMIZERS, "Let the factory give the same on all"))


def _options(strategy: Strategy) -> dict[str, str]:
    """Return a strategy's name and each option of its configuration."""
    config = getattr(strategy, "config", None)
    given = {each.name: getattr(config, each.name) for each in fields(config)} if is_dataclass(config) else {}
    kind = type(config).__name__
    return {"strategy": strategy.name, **{f"{kind}.{name}": _text(each) for name, each in given.items()}}


def _text(value: Any) -> str:
    """Return a value as a text that is the same in all processes: without addresses or random order."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (set, frozenset)):
        value = sorted(map(_text, value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _made(
    task: nn.Module, updaters: Mapping[str, Updater], total_steps: int | None
) -> Iterator[tuple[str, str]]:
    """Describe optimizers, each part under a name."""
    for each in updaters.values():
        which = f"optimizer {each.name!r}"
        yield from _settings(task, which, each.optimizer)
        yield f"max_grad_norm of {which}", _text(each.max_grad_norm)
        for name, value in _scheduled(each, total_steps):
            yield f"{name} of {which}", value


def _settings(module: nn.Module, which: str, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    names = parameter_names(module)
    yield f"the kind of {which}", type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in names:  # a strategy may have replaced parameters
                yield f"the group of {names[parameter]!r}", f"{number} of {which}"
        for name, value in group.items():
            if name not in ("params", "param_names"):
                yield f"{name} of group {number} of {which}", _text(value)


def _scheduled(updater: Updater, total_steps: int | None) -> Iterator[tuple[str, str]]:
    schedule, scheduler = updater.schedule, updater.scheduler
    if schedule is not None:
        last = _SAMPLED[-1] if total_steps is None else max(total_steps - 1, 0)
        for step in dict.fromkeys(min(each, last) for each in _SAMPLED):
            yield f"the schedule's factor at step {step}", _text(schedule(step))
        for name, value in getattr(schedule, "__dict__", {}).items():
            yield f"the schedule's {name}", _text(value)
    for each in updater.scheduled:
        for step in _SAMPLED:
            yield f"the factor of {each.name} at step {step}", _text(each.factor(step))
    if scheduler is not None:
        yield "the kind of the scheduler", type(scheduler).__name__
        for name, value in scheduler.state_dict().items():
            yield f"the scheduler's {name}", _text(value)


def _tensors(module: nn.Module) -> dict[str, str]:
    """Describe the parameters and buffers that have a size."""
    found = {}
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(each):
            frozen = ", frozen" if isinstance(each, nn.Parameter) and not each.requires_grad else ""
            found[repr(name)] = f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}{frozen}"
    return found
