"""The optimizers of a run, each with its parameters, schedule and clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.checkpoint.weights.module_state import parameter_names as parameter_names_of
from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.core.validation import check_no_class
from drivetrain.engine.optimizer_modes import has_modes
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import check_supported
from drivetrain.strategies.optimizer_step import step as make_step
from drivetrain.task.optim.build import (
    ScheduledSetting,
    apply_factor,
    build_optimizer,
    build_schedule,
    check_gradients,
    check_parameters,
    numbers_of,
    remember_base_rates,
    schedule_lengths,
    scheduled_settings,
)
from drivetrain.task.optim.config import OptimizerConfig, refuse_closure
from drivetrain.task.optim.given import (
    apply_changes,
    changes,
    described,
    fresh_values,
    given_settings,
    is_restored,
    return_to_base,
)
from drivetrain.task.optim.groups import group_titles
from drivetrain.task.optim.low_precision import WeightUpdates
from drivetrain.task.optim.schedules import PlateauSchedule, Schedule
from drivetrain.task.optim.state import start_momenta
from drivetrain.task.optim.torch_schedule import TorchSchedule, kind_of
from drivetrain.task.task import TaskModule

_NO_VALUES: Mapping[str, float] = {}

DEFAULT = "default"
"""The name of the only optimizer of a task that configures one."""

OptimizerSpec = OptimizerConfig | Callable[[list[nn.Parameter]], Any]


class Updater:
    """One optimizer with its parameters, schedule and clipping.

    Attributes:
        name: Its name in `configure_optimizers`; "default" for an only one.
        optimizer: The optimizer.
        parameters: The parameters it trains now.
        schedule: The factor of the base rate as a function of `unit`, or None when it is always 1.
        unit: The count of `Progress` that the schedule follows: "steps" or "tokens".
        torch_schedule: A torch scheduler that the user made and when it is stepped, or None.
        max_grad_norm: The limit of the gradient's norm; None disables clipping.
        warmup: The length of the warm-up, in `unit`.
        may_unfuse: Whether a fused kernel was chosen here, and is left where it cannot take the gradients.
        given: The settings that the user gave, as texts by name; see `note_given`.
        kept: Those that a resume has kept from its checkpoint instead.
        titles: The title of each group in the names of rates; see `group_titles`.
        scheduled: The other settings of the optimizer that follow schedules.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        schedule: Schedule | PlateauSchedule | None = None,
        torch_schedule: TorchSchedule | None = None,
        max_grad_norm: float | None = None,
        titles: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.schedule = schedule
        self.torch_schedule = torch_schedule
        self.max_grad_norm = max_grad_norm
        self.titles = titles
        self.unit, self.warmup = "steps", 0
        self.scheduled: tuple[ScheduledSetting, ...] = ()
        self.may_unfuse = False
        self.given: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self._fresh: dict[str, Any] = {}

    def note_given(self, config: OptimizerConfig | None) -> None:
        """Note the settings that the user gave, before a checkpoint or a schedule changes them."""
        self.may_unfuse = config is not None and config.fused is None
        self.given = given_settings(self.optimizer, config, self.torch_schedule)
        self._fresh = fresh_values(self.optimizer, self.torch_schedule)

    def take_given(self, before: Mapping[str, str], settings_of: str | None) -> tuple[str, str]:
        """Reconcile what the user gives now with what they gave to the run that a checkpoint is of.

        Args:
            before: `given` of that run.
            settings_of: "program" for the settings of now, "checkpoint" for those of the checkpoint,
                None for neither.

        Returns:
            A text of the changes that the run keeps out, and one of those that it goes on with; empty if
            there are none. A named schedule is no part of the state that is kept.

        Raises:
            ConfigError: There are some, and `optimizer_settings` is None.
        """
        changed = changes(before, self.given)
        if settings_of is not None:
            return_to_base(changed, self.optimizer)
        if settings_of == "checkpoint":  # loading the state has restored them
            self.kept = {name: old for name, (old, _) in changed.items() if is_restored(name)}
            self.given |= self.kept
            return (
                described({name: changed[name] for name in self.kept}),
                described({name: change for name, change in changed.items() if name not in self.kept}),
            )
        text = described(changed)
        if changed and settings_of is None:
            raise ConfigError(
                f"the optimizer of this run has other settings than that of the checkpoint: {text}. To use"
                " the program's, fit(..., resume='auto', optimizer_settings='program'); to use the"
                " checkpoint's, give them again, or optimizer_settings='checkpoint'"
            )
        apply_changes(changed, self._fresh, self.optimizer, self.torch_schedule)
        return "", text

    @property
    def scheduler(self) -> Any:
        """The torch scheduler that the user made, or None."""
        return None if self.torch_schedule is None else self.torch_schedule.scheduler

    @property
    def follows_steps(self) -> bool:
        """Whether something follows each step."""
        timed = self.torch_schedule
        steps = timed is not None and timed.unit == "steps"
        return self.schedule is not None or bool(self.scheduled) or steps

    def monitored_metric(self) -> tuple[str, str] | None:
        """Return the name of the value that the schedule depends on, and what its steps follow:
        "validations", "epochs" or "steps"; None if it needs none.
        """
        if isinstance(self.schedule, PlateauSchedule):
            return self.schedule.metric, "validations"
        timed = self.torch_schedule
        if timed is None or timed.metric is None or not (timed.required or timed.unit == "validations"):
            return None
        return timed.metric, timed.unit

    def resolve_direction(self, direction: Callable[[str], str | None]) -> None:
        """Let a schedule that monitors a value take over whether less or more of it is better."""
        timed = self.torch_schedule
        if isinstance(self.schedule, PlateauSchedule):
            self.schedule.resolve_direction(direction(self.schedule.metric))
        if timed is not None and timed.metric is not None:
            timed.resolve_direction(direction(timed.metric))

    def leave_out_frozen(self) -> None:
        """Take the parameters of the optimizer that require gradients now as those to train."""
        groups = self.optimizer.param_groups
        self.parameters = [each for group in groups for each in group["params"] if each.requires_grad]
        start_momenta(self.optimizer)

    def set_rate(self, progress: Progress) -> None:
        """Set the learning rate and the scheduled settings of the next step, if they follow our schedules."""
        if self.schedule is not None:
            apply_factor(self.optimizer, self.schedule(getattr(progress, self.unit)))
        for each in self.scheduled:
            each.apply(self.optimizer, progress)

    def advance(self, progress: Progress) -> None:
        """After a step, set the rate of the next one."""
        self.set_rate(progress)
        if self.torch_schedule is not None:
            self.torch_schedule.step("steps", progress.steps, _NO_VALUES)

    def observe(self, metrics: Mapping[str, float], progress: Progress) -> None:
        """After an evaluation, pass the metrics to a schedule that uses them."""
        if isinstance(self.schedule, PlateauSchedule):
            self.schedule.observe(metrics)
            self.set_rate(progress)
        if self.torch_schedule is not None:
            self.torch_schedule.step("validations", 1, metrics)

    def end_epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """After epoch number `epoch`, from 1, step a schedule by epoch."""
        if self.torch_schedule is not None:
            self.torch_schedule.step("epochs", epoch, metrics)

    def rates(self) -> dict[str, float]:
        """Return the learning rate now, by group; the names do not depend on the rates."""
        return self._by_title("lr", self.titles)

    def scheduled_values(self) -> dict[str, float]:
        """Return the learning rate and the scheduled settings now, by the names of their logged values."""
        found = self.rates()
        for each in self.scheduled:
            found |= self._by_title(each.name, each.titles)
        return found

    def _by_title(self, setting: str, titles: Sequence[str]) -> dict[str, float]:
        prefix = setting if self.name == DEFAULT else f"{setting}/{self.name}"
        groups = self.optimizer.param_groups
        if len(titles) != len(groups):
            titles = [""] if len(groups) == 1 else [str(index) for index in range(len(groups))]
        return {
            f"{prefix}{part}/{title}" if title else f"{prefix}{part}": float(value)
            for title, group in zip(titles, groups, strict=True)
            # None where the optimizer finds its own rate; the base 0 where biases have no weight decay
            if group.get(setting) is not None and (setting == "lr" or group[f"initial_{setting}"])
            for part, value in _parts(group[setting])
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, if it has one."""
        state: dict[str, Any] = {}
        if isinstance(self.schedule, PlateauSchedule):
            state["plateau"] = self.schedule.state_dict()
        if self.scheduler is not None:
            state["scheduler"], state["kind"] = self.scheduler.state_dict(), kind_of(self.scheduler)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if unknown := sorted(set(state) - {"plateau", "scheduler", "kind"}):
            raise CheckpointError(
                f"the schedule of optimizer {self.name!r} keeps no {unknown}: the checkpoint is damaged"
            )
        here, there = _schedule_of(self.state_dict()), _schedule_of(state)
        if here != there:
            raise CheckpointError(
                f"the optimizer {self.name!r} has {here}, and the checkpoint the state of {there}. Resume"
                " with the schedule that it was saved with, or begin a new run from its weights:"
                " task.load_weights(path)"
            )
        if isinstance(self.schedule, PlateauSchedule):
            self.schedule.load_state_dict(state["plateau"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(state["scheduler"]))


def _parts(setting: Any) -> list[tuple[str, Any]]:
    """Return the numbers of a setting, with what their names end in."""
    several = numbers_of(setting)
    return [("" if several is not setting else f".{place}", each) for place, each in enumerate(several)]


class JointOptimizer(Optimizer):
    """Optimizers as one: their gradients are unscaled, clipped, applied and skipped together.

    Args:
        optimizers: The optimizers, which keep their parameters, states and settings.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # without super().__init__, which would take over the parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all of them, as they are now: loading a state replaces them."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The states of all of them."""
        return {parameter: slots for each in self.optimizers for parameter, slots in each.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for each in self.optimizers:
            make_step(each)


def joint_updater(updaters: Sequence[Updater], max_grad_norm: float | None) -> Updater:
    """Return the only updater, or one that steps the optimizers of all.

    Args:
        max_grad_norm: The limit of the norm of all gradients together.
    """
    if len(updaters) == 1:
        return updaters[0]
    name = ", ".join(each.name for each in updaters)
    joint = Updater(name, JointOptimizer([each.optimizer for each in updaters]), max_grad_norm=max_grad_norm)
    joint.parameters = [
        parameter for each in updaters for parameter in each.parameters
    ]  # without frozen ones
    return joint


def check_several(
    task: nn.Module, updaters: Sequence[Updater], max_grad_norm: float | None, joint: bool
) -> None:
    """Check that each parameter has one optimizer, and that one loss can train by all of them if it is joint.

    Raises:
        ConfigError: Two of them have the same parameter, or one has a clipping of its own.
    """
    owners: dict[Tensor, str] = {}
    names: dict[Any, str] = parameter_names_of(task)
    for each in updaters if len(updaters) > 1 else ():
        if joint and each.max_grad_norm != max_grad_norm:
            raise ConfigError(
                f"optimizer {each.name!r} has max_grad_norm={each.max_grad_norm}, and one loss trains by all"
                " optimizers together, so the gradient is clipped by its global norm: give the limit to the"
                " Trainer. To clip each by itself, write a training_step that yields to each"
            )
        for parameter in each.parameters:
            if (other := owners.setdefault(parameter, each.name)) != each.name:
                raise ConfigError(
                    f"the optimizers {other!r} and {each.name!r} both have"
                    f" {names.get(parameter, 'a parameter')!r}, and a parameter has one optimizer. Give it"
                    " to one of them, by OptimizerConfig(parameters=...). A function is given all trained"
                    f" parameters: let it take its own, such as self.{each.name}.parameters()"
                )


def _schedule_of(state: Mapping[str, Any]) -> str:
    """Return the schedule whose state this is, for a message."""
    if "scheduler" in state:
        return f"the schedule {state['kind']}"
    return "the schedule 'reduce_on_plateau'" if "plateau" in state else "no schedule with a state"


def optimizer_specs(configured: Any) -> dict[str, OptimizerSpec]:
    """Return the result of a task's `configure_optimizers` by name."""
    if isinstance(configured, Optimizer):
        raise ConfigError(
            f"configure_optimizers returned a finished {type(configured).__name__}. It is too early to build"
            " one: the strategy may still move or shard the parameters. Return OptimizerConfig(...), or a"
            " function of the parameters, such as `lambda params:"
            f" torch.optim.{type(configured).__name__}(params, ...)`"
        )
    _check_not_class(configured)
    if isinstance(configured, Mapping):
        if not configured:
            raise ConfigError("configure_optimizers returned an empty mapping")
        specs: dict[str, OptimizerSpec] = {}
        for name, spec in configured.items():
            _check_not_class(spec)
            if not isinstance(name, str) or not name:
                raise ConfigError(f"an optimizer's name must be a text, not {name!r}")
            specs[name] = _checked_spec(spec, f" for {name!r}")
        return specs
    return {DEFAULT: _checked_spec(configured)}


def _checked_spec(spec: object, whose: str = "") -> OptimizerSpec:
    if isinstance(spec, OptimizerConfig) or callable(spec):
        return spec
    given = "nothing (is a `return` missing?)" if spec is None else f"a {type(spec).__name__}"
    raise ConfigError(
        f"configure_optimizers returned {given}{whose}; allowed are an OptimizerConfig, a mapping of names to"
        " them, or a function of the parameters. The function returns an optimizer or (optimizer, scheduler)."
        " The scheduler steps after each step, unless a TorchSchedule says otherwise"
    )


def _check_not_class(spec: object) -> None:
    """Check that it is no class; an optimizer's is a function of the parameters."""
    if not (isinstance(spec, type) and issubclass(spec, Optimizer)):
        check_no_class("configure_optimizers", spec)


def configured_specs(task: TaskModule, strategy: Strategy) -> dict[str, OptimizerSpec]:
    """Return the optimizers of a task by name, after a check that the strategy can step them."""
    kind, instead = type(task).__name__, "Use 'ddp' or 'fsdp'"
    if is_interleaved(task):
        check_supported(strategy, "generators", f"{kind}.training_step, a generator,", instead)
    specs = optimizer_specs(task.configure_optimizers())
    if len(specs) > 1:
        several = f"{kind}, which has {len(specs)} optimizers ({', '.join(map(repr, specs))}),"
        check_supported(strategy, "generators", several, instead)
    return specs


def parameter_names(task: nn.Module, name: str, spec: OptimizerConfig, alone: bool) -> set[str] | None:
    """Return the names of an optimizer's parameters: those its configuration selects, or the submodule of its
    name.
    """
    if alone or spec.parameters is not None:
        return None
    names = {each for each in parameter_names_of(task).values() if each.startswith(f"{name}.")}
    if not names:
        children = ", ".join(repr(child) for child, _ in task.named_children())
        raise ConfigError(
            f"which parameters does the optimizer {name!r} train? Name it after a submodule ({children}), or"
            " give OptimizerConfig(parameters='pattern.*')"
        )
    return names


def build_updaters(
    task: nn.Module,
    specs: Mapping[str, OptimizerSpec],
    total_steps: int | None,
    max_grad_norm: float | None,
    weight_updates: WeightUpdates | None = None,
    calendar: Calendar | None = None,
) -> dict[str, Updater]:
    """Build the optimizers of a task on its current parameters.

    Args:
        weight_updates: How weights of 16 bits take updates; None leaves it to the optimizers.
        calendar: The calendar of the run, for schedules in epochs and tokens.
    """
    updaters: dict[str, Updater] = {}
    weight_updates = weight_updates or WeightUpdates("nearest")
    for name, spec in specs.items():
        if isinstance(spec, OptimizerConfig):
            names = parameter_names(task, name, spec, alone=len(specs) == 1)
            with weight_updates.building(task) as finish:
                optimizer = finish(build_optimizer(spec, task, names))
            schedule = build_schedule(spec, total_steps, calendar)
            norm = spec.max_grad_norm if spec.max_grad_norm is not None else max_grad_norm
            titles = group_titles(task, optimizer, spec.groups)
            updaters[name] = Updater(name, optimizer, schedule, None, norm, titles)
            updaters[name].unit, updaters[name].warmup, *_ = schedule_lengths(spec, total_steps, calendar)
            scheduled = scheduled_settings(spec, task, optimizer, total_steps, calendar)
            updaters[name].scheduled = tuple(scheduled)
        else:
            optimizer, scheduler = made_by(spec, task, weight_updates)
            titles = group_titles(task, optimizer)
            updaters[name] = Updater(name, optimizer, None, scheduler, max_grad_norm, titles)
        refuse_closure(optimizer)
        if has_modes(optimizer):
            optimizer.train()  # type: ignore[attr-defined]
        updaters[name].note_given(spec if isinstance(spec, OptimizerConfig) else None)
    return updaters


def made_by(
    factory: Callable[[list[nn.Parameter]], Any], module: nn.Module, weight_updates: WeightUpdates
) -> tuple[Optimizer, TorchSchedule | None]:
    """Call a user's factory with a module's trained parameters, and check the result."""
    with weight_updates.building(module) as finish:
        made, scheduler = _checked(
            factory([each for each in module.parameters() if each.requires_grad]), factory
        )
        return finish(made), scheduler


def _checked(made: Any, factory: Callable[..., Any]) -> tuple[Optimizer, TorchSchedule | None]:
    """Return the optimizer and the schedule that a user's factory has made."""
    scheduler = None
    if isinstance(made, tuple) and len(made) == 2:
        made, scheduler = made
    if not isinstance(made, Optimizer):
        described = getattr(factory, "__qualname__", type(factory).__name__)
        raise ConfigError(
            f"{described} returned a {type(made).__name__}; it must return an optimizer or (optimizer,"
            " schedule)"
        )
    if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
        scheduler = TorchSchedule(scheduler)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "a ReduceLROnPlateau needs the name of the value that it monitors: return (optimizer,"
            " TorchSchedule(scheduler, metric='validation/loss')), or use"
            " OptimizerConfig(schedule='reduce_on_plateau', schedule_options={...})"
        )
    if scheduler is not None and not isinstance(scheduler, TorchSchedule):
        raise ConfigError(
            "a schedule must be a torch.optim.lr_scheduler.LRScheduler, or a TorchSchedule with one, not a"
            f" {type(scheduler).__name__}"
        )
    check_parameters(made)
    remember_base_rates(made)
    return made, None if scheduler is None else scheduler.made(made)


@contextmanager
def checking_gradients(updaters: Iterable[Updater]) -> Iterator[None]:
    """Run the block, the first step of a program, with a look at the gradients that fused kernels take."""
    handles = [
        each.optimizer.register_step_pre_hook(partial(check_gradients, each.may_unfuse))
        for each in updaters
        if any(group.get("fused") for group in each.optimizer.param_groups)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def long_warmups(updaters: Mapping[str, Updater], whole: Every | None) -> Iterator[str]:
    """Yield a sentence for each warm-up that a fit of this length ends before."""
    for name, each in updaters.items():
        of = "" if len(updaters) == 1 else f" of the optimizer {name!r}"
        if whole is not None and whole.unit == each.unit and whole.amount <= each.warmup:
            yield (
                f"the warm-up{of} takes {each.warmup:,} {each.unit} and this fit {int(whole.amount):,}: the"
                " full learning rate is never used. Lower warmup_steps, use warmup_ratio, or train longer"
            )


def check_trained(task: nn.Module, trained: Sequence[nn.Parameter], restore: Callable[[], object]) -> None:
    """Check that every parameter with a gradient was there when the optimizers were made.

    A copy of weights that the task keeps for itself has none.

    Args:
        restore: Restores the parameters' original form, if the strategy changes it in between.
    """
    known = {id(each) for each in trained}
    strangers = [
        name for name, each in task.named_parameters() if each.requires_grad and id(each) not in known
    ]
    if not strangers:
        return
    restore()
    named = dict(task.named_parameters())
    new = (name for name in strangers if id(named[name]) not in known)
    late = next((name for name in new if named[name].grad is not None), None)
    if late is not None:
        raise ConfigError(
            f"the parameter {clean_name(late)!r} was added to {type(task).__name__}, replaced or unfrozen"
            " after the run began. It would not be trained, or differently on each process. Create it in the"
            " constructor. To train it only later, give the Trainer the callback"
            f" Freeze({clean_name(late)!r}, until='1 epoch'). Otherwise call requires_grad_(False) on it"
        )


def is_interleaved(task: nn.Module) -> bool:
    """Return whether the task's training step is a generator that names an optimizer at each yield."""
    return inspect.isgeneratorfunction(getattr(type(task), "training_step", None))
