"""Conflicts between the settings, the task and the data, each as a sentence with a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from drivetrain.callbacks import EarlyStopping
from drivetrain.checkpoint.saving.config import chosen_policies, rankings
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS, newest_first
from drivetrain.checkpoint.storage.filesystem import StorageError
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.calendar import RunLength, Trigger
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.int_schedule import most
from drivetrain.core.intervals import Every
from drivetrain.core.messages import sized
from drivetrain.engine.updater import long_warmups
from drivetrain.run.messages import as_given
from drivetrain.run.metric_names import MetricNames
from drivetrain.run.settings import RunSettings, known_accumulation
from drivetrain.strategies import Strategy
from drivetrain.strategies.checks import check_gathering
from drivetrain.strategies.fsdp.config import FSDPConfig
from drivetrain.strategies.wrapping import around, units, uses_of_parameters
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.task import TARGETS, TaskModule, measure_of, train_loaded
from drivetrain.trainer.assembly import every, given_run_dir
from drivetrain.trainer.checkpoints import checkpoint_root
from drivetrain.trainer.plan.counts import Epoch, Firings, firings
from drivetrain.trainer.plan.optimizers import Built

_ENDLESS = frozenset({"constant", "constant_with_warmup", "inverse_sqrt", "reduce_on_plateau"})


def conflicts(
    settings: RunSettings,
    task: TaskModule,
    strategy: Strategy,
    epoch: Epoch,
    length: RunLength,
    built: Built,
    points: Mapping[str, Firings],
    example: Any,
) -> Iterator[str]:
    """Yield all conflicts.

    Args:
        points: When the run validates and logs.
        example: A micro-batch of the data, or None.
    """
    yield from _of_length(settings, epoch, length)
    yield from _of_schedules(built, length)
    yield from _of_intervals(settings, epoch, length, points)
    yield from _of_validation(settings, task, built, points["validation"])
    yield from _of_modules(task, epoch, built)
    yield from _of_labels(task, example)
    yield from _of_place(settings, strategy, task)
    yield from _of_gathering(strategy, task)


def _of_length(settings: RunSettings, epoch: Epoch, length: RunLength) -> Iterator[str]:
    calendar, max_epochs, max_steps = length.calendar, settings.max_epochs, settings.max_steps
    if calendar.length is not None and max_epochs is not None and max_steps is not None:
        allowed = calendar.step_of(Every(max_epochs, "epochs"))
        if max_steps != allowed:
            given = [f"max_steps={max_steps}", f"max_epochs={max_epochs}"]
            late, early = given if max_steps > allowed else given[::-1]
            yield f"{late} is not reached: {early} ends the run after {length.steps} steps. Give one of them"
    accumulation = most(known_accumulation(settings))
    if epoch.batches is not None and accumulation > epoch.batches:
        yield (
            f"gradient_accumulation_steps={accumulation} is more than the {epoch.batches} micro-batches of "
            "an epoch; windows end with the epoch, so every step has fewer. Accumulate less, or make "
            "smaller micro-batches"
        )


def _of_schedules(built: Built, length: RunLength) -> Iterator[str]:
    yield from long_warmups(built.updaters, length.calendar.whole)
    for updater in built.updaters.values():
        if updater.torch_schedule is not None:
            try:
                updater.torch_schedule.check_length(length.steps, length.epochs)
            except ConfigError as error:
                yield str(error)
    for name, spec in built.specs.items():
        if not isinstance(spec, OptimizerConfig) or length.steps is None:
            continue
        of = "" if len(built.specs) == 1 else f" of the optimizer {name!r}"
        total = spec.total_steps
        endless = spec.schedule in _ENDLESS or callable(spec.schedule)
        if not isinstance(total, int) or total == length.steps or endless:
            continue
        what = "does not finish" if total > length.steps else "is at its end early"
        yield (
            f"the schedule {spec.schedule!r}{of} {what}: total_steps={total}, but the run has "
            f"{length.steps} steps. Leave total_steps out to follow the run"
        )


def _of_intervals(
    settings: RunSettings, epoch: Epoch, length: RunLength, points: Mapping[str, Firings]
) -> Iterator[str]:
    # The default policy also saves at the end; nobody chose its interval.
    asked = dict.fromkeys(each.interval for each in chosen_policies(settings.checkpoint))
    saves = [firings(Trigger(each, length.calendar), epoch, length) for each in asked]
    for name, due, instead in (
        ("validate_every", points["validation"], "the only validation is the one at the end"),
        ("log_every", points["logging"], "training is logged once, at the end"),
        *(("the checkpoint's every", each, "the only resume point is the one at the end") for each in saves),
    ):
        if due.every is not None and due.times == 0:
            yield (
                f"{name}={due.every} is longer than the run of {length.steps} steps: {instead}. "
                "Choose a shorter interval"
            )


def _of_validation(
    settings: RunSettings, task: TaskModule, built: Built, validation: Firings
) -> Iterator[str]:
    if validation.times != 0:
        return
    fix = "Give fit validation data, and see validate_every"
    default: Any = type(settings).__dataclass_fields__["validate_every"].default  # was not asked for
    if settings.validate_every is not None and every(settings.validate_every) != Every(default):
        yield f"validate_every={settings.validate_every} was asked for, but there is no validation. {fix}"
    monitored = [
        *(("early stopping", each.metric) for each in settings.callbacks if isinstance(each, EarlyStopping)),
        *(("CheckpointConfig", by) for by in rankings(chosen_policies(settings.checkpoint))),
    ]
    names = MetricNames(task)
    for who, name in monitored:
        if name is not None and names.stage_of(name) == "validation":
            yield f"{who} decides by {name!r}, which is never logged, because there is no validation. {fix}"
    if any("validations" in (each.monitored_metric() or ()) for each in built.updaters.values()):
        yield f"a schedule that follows the validations never acts, because there is no validation. {fix}"


def _of_modules(task: TaskModule, epoch: Epoch, built: Built) -> Iterator[str]:
    train_loaded(task)
    evaluating = [name or "the task" for name, module in task.named_modules() if not module.training]
    if evaluating:
        yield (
            f"in eval mode at the start of training: {_some(evaluating)}. Dropout is off there, and batch "
            "norm uses its running averages. Call task.train() first, unless that is meant"
        )
    norms = [
        name for name, module in task.named_modules() if isinstance(module, _BatchNorm) and module.training
    ]
    if norms and epoch.has_single_sample:
        yield (
            f"batch norm ({_some(norms)}) meets a micro-batch of one sample, and one sample has no variance."
            " Use larger micro-batches, drop_last=True, or group norm"
        )
    trained = {id(each) for updater in built.updaters.values() for each in updater.parameters}
    left = [name for name, each in task.named_parameters() if each.requires_grad and id(each) not in trained]
    if left:
        yield (
            f"no optimizer trains {_some(left)}. Configure one, or save their gradients by the callback "
            "Freeze(...) or requires_grad_(False)"
        )


def _of_labels(task: TaskModule, batch: Any) -> Iterator[str]:
    """Yield what to write for labels that torch's losses ignore, where samples are counted."""
    if measure_of(task).weight is not None:
        return
    given = {-1: batch[-1]} if isinstance(batch, (tuple, list)) else batch
    for key, labels in given.items() if isinstance(given, Mapping) else ():
        is_target = isinstance(labels, Tensor) and key in (-1, *TARGETS)
        if is_target and not labels.is_floating_point() and bool((labels == -100).any()):
            yield (
                f"batch[{key!r}] has labels of -100, which torch's losses ignore, and samples are counted, so"
                " that another split of a batch gives another gradient. Add to the task: def"
                f" loss_weight(self, batch): return (batch[{key!r}] != -100).sum() . A causal model counts"
                f" batch[{key!r}][..., 1:]"
            )


def _of_place(settings: RunSettings, strategy: Strategy, task: TaskModule) -> Iterator[str]:
    """Yield what a fit would refuse where it runs, or what this machine's memory does not hold."""
    if settings.run_dir is not None:
        given_run_dir(settings.run_dir)
    root = checkpoint_root(settings, settings.run_dir) if settings.checkpoint else None
    there: Sequence[str] = ()
    try:
        if root is not None and settings.dry_run is None:
            there = newest_first(file_system(root).join(root, CHECKPOINTS))
    except StorageError as error:  # such as that of a store that this machine does not reach
        yield f"whether an earlier run has checkpoints there is not known: {error}"
    if root is not None and there:
        yield (
            f"{as_given(settings, root)} holds the checkpoints of an earlier run (the newest is {there[0]}),"
            " and fit refuses to start there afresh. To go on from there, fit(..., resume='auto'); for a new"
            " run choose another run_dir"
        )
    config: Any = getattr(strategy, "config", None)
    if strategy.sharded and getattr(config, "gather_at_end", False):
        try:
            check_gathering(task, processes=max(1, strategy.world_size // settings.num_nodes))
        except StrategyError as error:
            yield str(error)


def _of_gathering(strategy: Strategy, task: TaskModule) -> Iterator[str]:
    """Yield what to write where an embedding or a head is larger than a block, and stays gathered."""
    config = getattr(strategy, "config", None)
    if not isinstance(config, FSDPConfig) or config.wrap != "auto" or config.tensor_parallel > 1:
        return
    blocks = units(task, config.wrap)
    apart = [*blocks, *itertools.chain(*around(task, blocks))]
    inside = {each for part in apart for each in part.parameters()}
    tied = {getattr(*uses[0]) for uses in uses_of_parameters(task) if len(uses) > 1}
    largest = max((sum(each.nbytes for each in block.parameters()) for block in blocks), default=0)
    left = {
        name: module.weight
        for name, module in task.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and module.weight not in inside | tied
    }
    names = [name for name, weight in left.items() if largest and weight.nbytes > largest]
    if names:
        size = sized(sum(left[name].nbytes for name in names))
        yield (
            f"{_some(names)}: larger than a block, and gathered for the whole step ({size}). FSDP gathers an"
            " embedding and a head on their own if their weights have one shape and the head no bias; or give"
            " FSDPConfig(wrap=function), with a function that is true for them and for the blocks"
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
