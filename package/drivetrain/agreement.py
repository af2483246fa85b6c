"""What all processes of a run must have alike: found before they exchange anything that would go wrong."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.distributed.ranks import Ranks
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.module_state import parameter_names
from drivetrain.strategies import Strategy
from drivetrain.task import TaskModule
from drivetrain.updates import Updater

if TYPE_CHECKING:
    from drivetrain.trainer import Trainer

_SETTINGS = (
    "max_epochs",
    "max_steps",
    "max_time",
    "precision",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "micro_batch",
    "on_bad_batch",
    "on_save_error",
    "validate_every",
    "log_every",
    "checkpoint",
    "compile",
    "memory",
    "preemption",
    "train_metrics",
    "seed",
    "limit_train_batches",
    "limit_validation_batches",
    "limit_test_batches",
    "limit_predict_batches",
)
"""What decides what a process does, and when; loggers, callbacks and the screen may be one rank's alone."""

_METHODS = (
    "configure_optimizers",
    "loss_weight",
    "metrics",
    "tokens",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
)
"""Methods of a task by which it is decided what the processes exchange."""

_SAMPLED = (0, 1, 10, 100, 1000, 10_000, 100_000)
"""Updates at which schedules are compared."""


def check_alike(trainer: Trainer, task: TaskModule, strategy: Strategy, verb: str, **arguments: Any) -> None:
    """See that the ranks do the same, with the same settings, strategies and arguments, and tasks of the same
    parameters.

    One exchange of a few numbers, before a run; names the first that differs.

    Args:
        trainer: The settings.
        task: The task.
        strategy: It has been set up, and no more.
        verb: The Trainer's method that was called, such as "fit".
        **arguments: What else the verb was given, such as `resume`.

    Raises:
        ConfigError: The verb, a setting or an argument differs.
        StrategyError: A parameter or buffer differs in name, shape, dtype, whether it is trained or has
            values; or the tasks override different methods.
    """
    ranks = strategy.ranks
    if ranks.size == 1:
        return
    settings = {**_options(strategy), **{name: _told(getattr(trainer, name)) for name in _SETTINGS}}
    arguments = {name: _told(value) for name, value in arguments.items()}
    methods = {name: "overridden" if task.overrides(name) else "the default" for name in _METHODS}
    tensors = _described(task)
    found = ranks.all_gather((settings, arguments, methods, zlib.crc32(repr(tensors).encode()), verb))
    different = _difference([{"the verb": each[4]} for each in found])
    if different is not None:
        raise ConfigError(
            f"the ranks do different things: {different}. All make the same calls, in one order"
        )
    different = _difference([each[0] for each in found])
    if different is not None:
        raise ConfigError(
            f"the ranks were given different Trainers: {different}. Give all the same; rank 0 alone writes"
            " files"
        )
    different = _difference([each[1] for each in found])
    if different is not None:
        raise ConfigError(f"the ranks were given different arguments: {different}. Give all the same")
    different = _difference([each[2] for each in found])
    if different is not None:
        raise StrategyError(f"the ranks have different tasks: {different}. Make the same task on all")
    if any(each[3] != found[0][3] for each in found):
        raise _different(ranks.all_gather(tensors))


def check_optimizers_alike(
    task: nn.Module, updaters: Mapping[str, Updater], total_updates: int | None, ranks: Ranks
) -> None:
    """See that the ranks have made the same optimizers: else each would train a model of its own, in silence.

    One exchange of a number; of more only where that differs.

    Raises:
        ConfigError: An optimizer differs in its kind, parameters, settings, schedule or clipping; says how.
    """
    if ranks.size == 1:
        return
    _compare_made(dict(_made(task, updaters, total_updates)), ranks, "configure_optimizers")


def _compare_made(made: Mapping[str, str], ranks: Ranks, maker: str) -> None:
    if len(set(ranks.all_gather(zlib.crc32(repr(made).encode())))) > 1:
        raise ConfigError(
            "the ranks have made different optimizers, so that each would train a model of its own:"
            f" {_difference(ranks.all_gather(made))}. Let {maker} give the same on all"
        )


def check_module_alike(strategy: Strategy, module: nn.Module) -> None:
    """See that the ranks prepare the same module, under the same strategy, for a loop of their own.

    Raises:
        ConfigError: The strategy or one of its options differs.
        StrategyError: A parameter or buffer differs; see `check_alike`.
    """
    ranks = strategy.ranks
    if ranks.size == 1:
        return
    tensors = _described(module)
    found = ranks.all_gather((_options(strategy), zlib.crc32(repr(tensors).encode())))
    different = _difference([each[0] for each in found])
    if different is not None:
        raise ConfigError(f"the ranks were given different Engines: {different}. Give all the same")
    if any(each[1] != found[0][1] for each in found):
        raise _different(ranks.all_gather(tensors))


def check_optimizer_alike(module: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """As `check_optimizers_alike`, for the optimizer of a loop of one's own.

    Raises:
        ConfigError: It differs in its kind, parameters or settings; says how.
    """
    if ranks.size > 1:
        _compare_made(dict(_settings(module, "the optimizer", optimizer)), ranks, "the factory")


def _options(strategy: Strategy) -> dict[str, str]:
    """A strategy's name and, each by itself, the options of its configuration."""
    config = getattr(strategy, "config", None)
    given = {each.name: getattr(config, each.name) for each in fields(config)} if is_dataclass(config) else {}
    kind = type(config).__name__
    return {"strategy": strategy.name, **{f"{kind}.{name}": _told(each) for name, each in given.items()}}


def _told(value: Any) -> str:
    """A value as a text that is the same in all processes: without addresses, or an order of chance."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (set, frozenset)):
        value = sorted(map(_told, value))
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _difference(found: Sequence[Mapping[str, str]]) -> str | None:
    """The first that is not the same everywhere, with what each rank has."""
    for name in dict.fromkeys(name for each in found for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            holders.setdefault(each.get(name, "not there"), []).append(rank)
        if len(holders) > 1:
            listed = " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
            return f"{name} is {listed}"
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _made(
    task: nn.Module, updaters: Mapping[str, Updater], total_updates: int | None
) -> Iterator[tuple[str, str]]:
    """What optimizers are, each part under a name."""
    for each in updaters.values():
        which = f"optimizer {each.name!r}"
        yield from _settings(task, which, each.optimizer)
        yield f"max_grad_norm of {which}", _told(each.max_grad_norm)
        for name, value in _scheduled(each, total_updates):
            yield f"{name} of {which}", value


def _settings(module: nn.Module, which: str, optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    names = parameter_names(module)
    yield f"the kind of {which}", type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter in names:  # a strategy may have put others in their place
                yield f"the group of {names[parameter]!r}", f"{number} of {which}"
        for name, value in group.items():
            if name not in ("params", "param_names"):
                yield f"{name} of group {number} of {which}", _told(value)


def _scheduled(updater: Updater, total_updates: int | None) -> Iterator[tuple[str, str]]:
    schedule, scheduler = updater.schedule, updater.scheduler
    if schedule is not None:
        last = _SAMPLED[-1] if total_updates is None else max(total_updates - 1, 0)
        for update in dict.fromkeys(min(each, last) for each in _SAMPLED):
            yield f"the schedule's factor at update {update}", _told(schedule(update))
        for name, value in getattr(schedule, "__dict__", {}).items():
            yield f"the schedule's {name}", _told(value)
    if scheduler is not None:
        yield "the kind of the scheduler", type(scheduler).__name__
        for name, value in scheduler.state_dict().items():
            yield f"the scheduler's {name}", _told(value)


def _described(task: nn.Module) -> list[tuple[Any, ...]]:
    sized = [(name, each) for name, each in task.named_parameters() if not is_lazy(each)]
    parameters = [(name, *_kind(each), each.requires_grad) for name, each in sized]
    return [*parameters, *((name, *_kind(each)) for name, each in task.named_buffers())]


def _kind(tensor: Tensor) -> tuple[list[int], str, bool]:
    return list(tensor.shape), str(tensor.dtype), tensor.is_meta


def _different(found: list[list[tuple[Any, ...]]]) -> StrategyError:
    first = found[0]
    for rank, other in enumerate(found):
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                return StrategyError(
                    f"the ranks have different tasks: rank 0 has {_text(mine)}, rank {rank} {_text(theirs)}."
                    " Make the same task on all"
                )
        if len(other) != len(first):
            return StrategyError(
                f"the ranks have different tasks: rank 0 has {len(first)} parameters and buffers, rank {rank}"
                f" {len(other)}. Make the same task on all"
            )
    return StrategyError("the ranks have different tasks")


def _text(described: tuple[Any, ...]) -> str:
    name, shape, dtype, is_meta, *trained = described
    frozen = ", frozen" if trained == [False] else ""
    return f"{name!r} of shape {shape} ({dtype}{frozen}{', on the meta device' if is_meta else ''})"
