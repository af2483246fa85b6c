"""The optimizers of a planned fit: their rates over the run, and the memory of weights and state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.calendar import RunLength
from drivetrain.core.intervals import Every
from drivetrain.core.progress import Progress
from drivetrain.engine.updater import OptimizerSpec, Updater, build_updaters, optimizer_specs
from drivetrain.run.settings import RunSettings
from drivetrain.strategies.base import Memory
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.quantized import is_quantized, parts_of, uncompiled
from drivetrain.task.optim.schedules import PlateauSchedule
from drivetrain.task.task import TaskModule
from drivetrain.trainer.plan.answers import Answers

_CONTAINERS = (dict, list, set)

_SAMPLED = 100  # the number of steps at which a user's schedule is sampled to find its peak
_HORIZON = 10_000  # the steps to search for the peak if the run's length is unknown


@dataclass(frozen=True)
class Rate:
    """A learning rate, or another scheduled setting, over the run; None where it is unknown beforehand.

    Attributes:
        start: At step 0.
        peak: The highest; None with a scheduler of torch's, which knows its rates one after the other only.
        peak_step: The first step at the peak; None if the schedule follows tokens.
        end: At the last step.
        curve: At about a hundred steps from the first to the last one; empty where the end is unknown.
    """

    start: float
    peak: float | None
    peak_step: int | None
    end: float | None
    curve: tuple[float, ...] = ()


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor like another without values."""
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def without_values(task: nn.Module, empty: Callable[[Tensor], Tensor] = on_meta) -> Any:
    """Return a copy of the task whose parameters and buffers have no values.

    Lists, mappings and sets among the attributes of modules are copied; all other attributes are shared.

    Args:
        empty: Makes a tensor like another.
    """
    made: dict[int, Any] = {}

    def tensor(old: Tensor | None) -> Tensor | None:
        if old is None or id(old) in made:
            return made.get(id(old))
        new = _of_parts(old, empty) if is_quantized(old) else empty(old)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, old.requires_grad)
            new.__dict__.update(old.__dict__)
        made[id(old)] = new
        return new

    def module(old: nn.Module | None) -> Any:
        if old is None or id(old) in made:
            return made.get(id(old))
        new = made[id(old)] = object.__new__(type(old))
        # A step may store tensors in a list or a mapping of the task, and these have no values.
        own = {name: copy.copy(each) for name, each in vars(old).items() if isinstance(each, _CONTAINERS)}
        new.__dict__.update({**vars(old), **own})
        for kind, remade in (("_parameters", tensor), ("_buffers", tensor), ("_modules", module)):
            new.__dict__[kind] = {name: remade(each) for name, each in old.__dict__[kind].items()}
        return new

    return module(task)


def _of_parts(tensor: Any, empty: Callable[[Tensor], Tensor]) -> Tensor:
    names, context = tensor.__tensor_flatten__()
    parts = {name: empty(getattr(tensor, name)) for name in names}
    made: Tensor = tensor.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return made


class Built:
    """The optimizers of the run, made on copies of the parameters without values.

    If that is impossible (a factory that reads weights or insists on fused kernels), they are made on the
    parameters themselves, which does not change these. The size of their state is then unknown.

    Attributes:
        module: The copy of the task, or the task itself.
        specs: The configuration of each optimizer.
        updaters: The optimizers with their schedules, by name.
        state: The tensors of their state, each with its parameter, or None when unknown.
    """

    def __init__(self, settings: RunSettings, task: TaskModule, length: RunLength) -> None:
        self.precision = as_precision(settings.precision)
        self.state: list[tuple[Tensor, Tensor]] | None = None
        try:
            self._build(self._converted(without_values(task)), settings, length)
            self.state = self._states()
        except Exception:  # of tensors without values; a fault of the real ones too is raised below
            self._build(task, settings, length)

    def _converted(self, module: nn.Module) -> nn.Module:
        """Run the block with the default dtype of the optimizers' computation."""
        if self.precision.updates_of_weights == "nearest":
            return self.precision.convert_module(module)
        return module.float()

    def _build(self, module: Any, settings: RunSettings, length: RunLength) -> None:
        self.module: nn.Module = module
        self.specs = optimizer_specs(module.configure_optimizers())
        specs = {name: _unfused(spec) for name, spec in self.specs.items()}
        self.updaters = build_updaters(
            module, specs, length.steps, settings.max_grad_norm, calendar=length.calendar
        )

    def _states(self) -> list[tuple[Tensor, Tensor]] | None:
        state: list[tuple[Tensor, Tensor]] = []
        for updater in self.updaters.values():
            if not all(each.is_meta for each in updater.parameters):
                return None  # a factory that found its way to the real ones
            # One of each shape is stepped, because a large model has hundreds of parameters and few shapes.
            stepped: dict[Any, Tensor] = {}
            like: dict[Tensor, Tensor] = {}
            for number, group in enumerate(updater.optimizer.param_groups):
                for each in group["params"]:
                    like[each] = stepped.setdefault((number, each.shape, each.stride(), each.dtype), each)
            for each in stepped.values():
                each.grad = torch.empty_like(each)
            try:
                with uncompiled(updater.optimizer), Answers(1.0):  # no state's size depends on a number
                    updater.optimizer.step()
            except Exception:  # such as one for sparse gradients only
                return None
            slots = {each: _tensors(kept) for each, kept in updater.optimizer.state.items()}
            state += [(each, slot) for each, other in like.items() for slot in slots.get(other, ())]
        return state

    def rates(self, whole: Every | None) -> dict[str, Rate]:
        """Return the rates over a run of this length; None if it is unknown."""
        return {
            key: rate for updater in self.updaters.values() for key, rate in _rates(updater, whole).items()
        }

    def sizes(self, memory: Memory | None) -> dict[str, int | None]:
        """Return the bytes of the parameters, their gradients and the optimizers' state in one process.

        Args:
            memory: What a process holds of the task; None if that is not known.
        """
        sizes: dict[str, int | None] = dict.fromkeys(("parameters", "gradients", "optimizer"))
        parameters = list(self.module.parameters())
        if memory is None:
            return sizes

        def part(of: str, parameter: Tensor, elements: int) -> int:
            fraction = memory.fractions.get(parameter, 1.0) if of in memory.divided else 1.0
            return round(elements * fraction)

        def size(of: str, each: Tensor, dtype: torch.dtype | None = None) -> int:
            if is_quantized(each):
                return part(of, each, sum(stored.nbytes for stored in parts_of("", each).values()))
            return part(of, each, each.numel()) * (dtype or self.stored_dtype(each, memory)).itemsize

        trained = [each for each in parameters if each.requires_grad]
        sizes["parameters"] = sum(size("parameters", each) for each in parameters)
        sizes["gradients"] = sum(size("gradients", each) for each in trained)
        if self.state is not None:
            kept = memory.copies or self.precision.updates_of_weights == "master"
            copies = sum(size("optimizer", each, torch.float32) for each in trained if kept)
            sizes["optimizer"] = copies + sum(
                # Numbers such as the count of steps are whole in every process.
                (part("optimizer", owner, each.numel()) if each.numel() > 1 else 1) * each.itemsize
                for owner, each in self.state
            )
        return sizes

    def stored_dtype(self, parameter: Tensor, memory: Memory | None = None) -> torch.dtype:
        """Return the dtype that a parameter is stored in during the run."""
        wanted = self.precision.param_dtype
        if memory is not None and memory.copies:
            wanted = memory.forward_dtype
        return wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype


def _unfused(spec: OptimizerSpec) -> OptimizerSpec:
    """Return the specification without `fused=True`: fused kernels need a real device, with equal state."""
    if isinstance(spec, OptimizerConfig) and spec.fused:
        spec = copy.copy(spec)
        object.__setattr__(spec, "fused", None)  # the class is frozen
    return spec


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return list(parts_of("", tree).values()) if is_quantized(tree) else [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [each for value in values for each in _tensors(value)]


def _rates(updater: Updater, whole: Every | None) -> dict[str, Rate]:
    """Return one optimizer's rates at the start, at the peak and at the end of the run."""
    updater.set_rate(Progress())
    starts = updater.scheduled_values()
    if updater.scheduler is not None:
        return {name: Rate(start, None, None, None) for name, start in starts.items()}
    ends = whole is not None and whole.unit == updater.unit
    horizon = int(whole.amount) if ends and whole is not None else _HORIZON
    # The named schedules peak just after the warm-up.
    points = {*range(0, horizon, -(-horizon // _SAMPLED)), updater.warmup, horizon - 1}
    history: dict[int, dict[str, float]] = {}
    for step in sorted(each for each in points if each < horizon):
        updater.set_rate(Progress(steps=step, tokens=step))
        history[step] = updater.scheduled_values()
    ended = ends and not isinstance(updater.schedule, PlateauSchedule)
    found: dict[str, Rate] = {}
    for name, start in starts.items():
        peak = max(history, key=lambda step: history[step][name])
        curve = tuple(each[name] for each in history.values()) if ended else ()
        first = peak if updater.unit == "steps" else None
        found[name] = Rate(start, history[peak][name], first, curve[-1] if ended else None, curve)
    return found
