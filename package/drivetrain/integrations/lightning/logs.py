"""The values that a module logs by `self.log`: kept on the device, reduced over batches and ranks when asked
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.data.batch import batch_size as size_of
from drivetrain.distributed.processes import rank
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.metrics.states import joined_states, members, turn_synchronisation_off

_LOG = logger(__name__)

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "min": "min", "max": "max"}


@dataclass(slots=True, eq=False)
class LoggedEntry:
    """One logged name: how it is reduced, and its value so far.

    Attributes:
        name: The name that the module gives, with the number of the loader.
        on_step: Whether its last value is logged at log points.
        on_epoch: Whether its reduction over the epoch or evaluation is logged.
        reduction: "mean", "sum", "min" or "max".
        to_loggers: Whether loggers get it; `run.metrics` has it in any case.
        prog_bar: Whether the progress bar shows it.
        metric: The torchmetrics object, or None.
        value: The reduction so far, before the division of a mean; None before the first value.
        weight: The weight of a mean so far.
        asked: The options that the module gave; empty for an entry from a checkpoint.
        latest: The last value, until a log point takes it.
        latest_weight: Its weight.
    """

    name: str
    on_step: bool
    on_epoch: bool
    reduction: str
    to_loggers: bool
    prog_bar: bool
    metric: Any = None
    value: Tensor | None = None
    weight: float = 0.0
    asked: tuple[Any, ...] = ()
    latest: Tensor | None = None
    latest_weight: float = 1.0

    def full_name(self, of_step: bool) -> str:
        """Return the name in loggers: with "_step" or "_epoch" if both are logged."""
        if self.on_step and self.on_epoch:
            return f"{self.name}_{'step' if of_step else 'epoch'}"
        return self.name


class Logs:
    """The values that a module logs in one part of the loop: in training, or in an evaluation.

    Args:
        module: The module, whose torchmetrics objects are found by their paths in it.

    Attributes:
        hook: The method of the module that runs now; each logs its own values.
        is_batch: Whether it is given a batch, so that a value is of that batch.
        batch: The batch.
        loader: The number to add to names; None for an only loader.
        steps_by_default: Whether values are logged at log points unless the module says otherwise.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.hook = ""
        self.is_batch = False
        self.batch: Any = None
        self.loader: int | None = None
        self.steps_by_default = False
        self.entries: dict[tuple[str, str], LoggedEntry] = {}

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value; see `LightningModule.log`. Values are those of all ranks, or of rank 0."""
        if rank_zero_only and rank():
            return
        if self.loader is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.loader}"
        asked = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        entry = self.entries.get((self.hook, name))
        if entry is None:
            if enable_graph or sync_dist_group is not None:
                raise ConfigError(
                    f"self.log({name!r}, ...) with enable_graph or sync_dist_group: logged values have no"
                    " graph, and are those of all ranks. Leave the argument out"
                )
            if name == "step":
                _LOG.warning(
                    "self.log('step', ...) sets the x axis of Lightning's loggers. Here the x axis is the"
                    " number of steps, and this value is given to no logger"
                )
            entry = self._new(name, prog_bar, logger, on_step, on_epoch, reduce_fx)
            entry.asked = asked
            self.entries[self.hook, name] = entry
        elif entry.asked != asked:
            if entry.asked:
                raise ConfigError(
                    f"{self.hook} called self.log({name!r}, ...) with other options than before. Give it the"
                    " same prog_bar, logger, on_step, on_epoch and reduce_fx each time, or another name"
                )
            entry.asked = asked  # the entry came from a checkpoint
        if type(value) is not Tensor and not isinstance(value, (Tensor, Number)):
            self._log_metric(entry, value)
            return
        tensor = as_scalar(name, value)
        if entry.on_step:
            entry.latest = tensor.clone()
        if entry.on_epoch:
            weight: float = 1
            if entry.reduction == "mean":
                weight = self._weight(batch_size)
                tensor = tensor * weight
                entry.weight += weight
            entry.value = (
                tensor.clone() if entry.value is None else _reduced(entry.reduction, entry.value, tensor)
            )
            entry.latest_weight = weight
        elif entry.on_step:
            entry.latest_weight = 1 if batch_size is None else batch_size

    def log_dict(self, dictionary: Any, *args: Any, **options: Any) -> None:
        """Log several values; see `LightningModule.log_dict`."""
        items: Iterable[tuple[str, Any]]
        if isinstance(dictionary, Mapping) and not isinstance(dictionary, torch.nn.Module):
            items = dictionary.items()
        else:  # a collection of torchmetrics
            items = dictionary.items(keep_base=False, copy_state=False)
        for name, value in items:
            self.log(name, value, *args, **options)

    def _weight(self, given: int | None) -> float:
        if given is not None:
            return given
        if not self.is_batch:
            return 1
        return size_of(self.batch) or 1

    def _new(
        self,
        name: str,
        prog_bar: bool,
        logger: bool | None,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
    ) -> LoggedEntry:
        if not self.hook:
            raise ConfigError(
                f"self.log({name!r}, ...) in a method that Lightning does not let log either. Log in a step,"
                " or in a hook of training or evaluation"
            )
        reduction = _REDUCTIONS.get(
            reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        )
        if reduction is None:
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}). Allowed: 'mean', 'sum', 'min', 'max'. For"
                " another reduction log a torchmetrics object"
            )
        step = self.steps_by_default if on_step is None else on_step
        epoch = not self.steps_by_default if on_epoch is None else on_epoch
        if step and not self.is_batch:
            raise ConfigError(f"self.log({name!r}, on_step=True) in {self.hook}, which has no batch")
        if not (step or epoch):
            raise ConfigError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing")
        return LoggedEntry(name, step, epoch, reduction, logger is None or logger, prog_bar)

    def _log_metric(self, entry: LoggedEntry, value: Any) -> None:
        if not all(callable(getattr(value, each, None)) for each in ("update", "compute", "reset")):
            raise ConfigError(
                f"self.log({entry.name!r}, ...) was given a {type(value).__name__}; it takes a number, a"
                " tensor with one number, or a torchmetrics object"
            )
        entry.metric = value
        # The result of its forward for this batch; torchmetrics has no public name for it.
        batch_value = getattr(value, "_forward_cache", None)
        if entry.on_step and isinstance(batch_value, Tensor):
            entry.latest = as_scalar(entry.name, batch_value).clone()

    # The logged values.

    def take_latest(self, ranks: Ranks) -> dict[LoggedEntry, float]:
        """Return the last values that are logged at log points, and forget them. All ranks call this."""
        found = self.latest(ranks)
        for entry in self.entries.values():  # also one whose name another hook has logged since
            entry.latest = None
        return found

    def latest(self, ranks: Ranks) -> dict[LoggedEntry, float]:
        """Return the last values that the next log point logs. All ranks call this."""
        fresh = {
            each.full_name(of_step=True): each for each in self.entries.values() if each.latest is not None
        }
        parts: dict[str, tuple[str, Any, float]] = {}
        for name, each in fresh.items():
            value, weight = each.latest, each.latest_weight
            assert value is not None
            parts[name] = (each.reduction, value * weight if each.reduction == "mean" else value, weight)
        values = _over_ranks(parts, ranks)
        found = {each: values.pop(name) for name, each in fresh.items()}
        for name, of_others in values.items():  # logged by other ranks alone
            found[LoggedEntry(name, True, False, "mean", True, False)] = of_others
        return found

    def take_epoch(self, ranks: Ranks) -> dict[LoggedEntry, float]:
        """Return the reductions over the epoch or evaluation, and begin anew. All ranks call this."""
        found = self.epoch(ranks, begins_anew=True)
        for each in self.entries.values():
            each.value, each.weight = None, 0.0
        return found

    def epoch(self, ranks: Ranks, begins_anew: bool = False) -> dict[LoggedEntry, float]:
        """Return the reductions over the epoch or evaluation so far. All ranks call this.

        Of a name that several hooks log, the value of the last one counts, as in Lightning.
        """
        own = {
            each.full_name(of_step=False): each
            for each in self.entries.values()
            if each.on_epoch and each.metric is None and each.value is not None
        }
        values = _over_ranks(
            {name: (each.reduction, each.value, each.weight) for name, each in own.items()}, ranks
        )
        found = {each: values.pop(name) for name, each in own.items()}
        for name, value in values.items():  # logged by other ranks alone
            found[LoggedEntry(name, False, True, "mean", True, False)] = value
        found.update(self._metrics(ranks, begins_anew))
        return found

    def _metrics(self, ranks: Ranks, begins_anew: bool) -> dict[LoggedEntry, float]:
        own = {name: each for name, each in self._metric_entries().items() if each.metric is not None}
        names = sorted(set().union(*ranks.all_gather([*own])) if not ranks.alone else own)
        found: dict[LoggedEntry, float] = {}
        modules = dict(self.module.named_modules())
        for name in names:
            path, _, full = name.partition("|")
            entry = own.get(name) or LoggedEntry(full, False, True, "mean", True, False)
            metric = modules[path] if entry.metric is None else entry.metric
            updated = bool(getattr(metric, "update_called", True)) and entry.metric is not None
            if ranks.alone:
                if updated:
                    found[entry] = float(as_scalar(full, metric.compute()))
            else:
                with (
                    _without_own_synchronisation(metric),
                    joined_states([metric], updated, ranks) as any_rank,
                ):
                    if any_rank:
                        found[entry] = float(as_scalar(full, metric.compute()))
        for name in names if begins_anew else ():
            path, _, _ = name.partition("|")
            (modules[path] if name not in own else own[name].metric).reset()
        return found

    def _metric_entries(self) -> dict[str, LoggedEntry]:
        found: dict[str, LoggedEntry] = {}
        paths: dict[int, str] = {}
        for each in self.entries.values():
            if each.metric is None or not each.on_epoch:
                continue
            if not paths:
                paths = {id(module): path for path, module in self.module.named_modules()}
            if id(each.metric) not in paths:
                raise ConfigError(
                    f"self.log({each.name!r}, ...) was given a torchmetrics object that is no attribute of"
                    " the module. Make it one, so that it is on the module's device and in its checkpoints"
                )
            found[f"{paths[id(each.metric)]}|{each.full_name(of_step=False)}"] = each
        return found

    # Checkpoints.

    def state_dict(self) -> list[dict[str, Any]]:
        """Return what is logged so far in an epoch."""
        return [
            {
                "hook": hook,
                "name": each.name,
                "flags": [each.on_step, each.on_epoch, each.to_loggers, each.prog_bar],
                "reduction": each.reduction,
                "value": each.value,
                "weight": each.weight,
            }
            for (hook, _), each in self.entries.items()
            if each.value is not None
        ]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        """Take over what `state_dict` has returned, of one rank or of several."""
        self.entries = {}
        for state in states:
            step, epoch, to_loggers, prog_bar = map(bool, state["flags"])
            reduction = _REDUCTIONS[state["reduction"]]
            entry = self.entries.setdefault(
                (str(state["hook"]), str(state["name"])),
                LoggedEntry(str(state["name"]), step, epoch, reduction, to_loggers, prog_bar),
            )
            value = state["value"].to(device)
            entry.value = value if entry.value is None else _reduced(reduction, entry.value, value)
            entry.weight += float(state["weight"])


class NamedLogs(Logs):
    """Logs that tell the module the hook that runs now, for a `log` of its own that calls `super().log`.

    Lightning's `log` asks the module for the name and `self.trainer` for the rest; see `ResultsPart`.
    """

    @property
    def hook(self) -> str:
        """The method of the module that runs now."""
        return self._hook

    @hook.setter
    def hook(self, name: str) -> None:
        self._hook = name
        vars(self.module)["_current_fx_name"] = name or None


def as_scalar(name: str, value: Any) -> Tensor:
    """Return a number as a detached tensor of float32 or float64.

    Raises:
        ConfigError: It has several numbers.
    """
    tensor: Any = (
        value.detach()
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=torch.get_default_dtype())
    )
    if hasattr(tensor, "placements"):  # a DTensor, such as the norm of a sharded gradient; all ranks log it
        tensor = tensor.full_tensor()
    if tensor.dtype is not torch.float32 and tensor.dtype is not torch.float64:
        tensor = tensor.to(torch.get_default_dtype())
    if tensor.ndim:
        if tensor.numel() != 1:
            raise ConfigError(
                f"self.log({name!r}, ...) takes one number, not a tensor of shape {tuple(tensor.shape)}. Log"
                " its mean, or each of its numbers under a name of its own"
            )
        tensor = tensor.reshape(())
    found: Tensor = tensor
    return found


def _reduced(reduction: str, first: Tensor, second: Tensor) -> Tensor:
    if reduction == "min":
        return torch.minimum(first, second)
    return torch.maximum(first, second) if reduction == "max" else first + second


def _over_ranks(own: Mapping[str, tuple[str, Any, float]], ranks: Ranks) -> dict[str, float]:
    """Return values by name: this rank's in one copy to the host, then those of all ranks."""
    listed: list[float] = []
    if own:
        tensors = [
            value.to(torch.float64 if value.device.type != "mps" else torch.float32)
            for _, value, _ in own.values()
        ]
        listed = torch.stack([each.to(tensors[0].device) for each in tensors]).tolist()
    mine = {
        name: (how, value, weight)
        for (name, (how, _, weight)), value in zip(own.items(), listed, strict=True)
    }
    joined: dict[str, tuple[str, float, float]] = {}
    for each in (mine,) if ranks.alone else ranks.all_gather(mine):
        for name, (how, value, weight) in each.items():
            if name not in joined:
                joined[name] = (how, value, weight)
                continue
            _, before, others = joined[name]
            value = {"min": min, "max": max}[how](before, value) if how in ("min", "max") else before + value
            joined[name] = (how, value, others + weight)
    return {name: value / weight if how == "mean" else value for name, (how, value, weight) in joined.items()}


@contextmanager
def _without_own_synchronisation(metric: Any) -> Iterator[None]:
    """Run the block with torchmetrics' own exchange off: it would wait for ranks without samples."""
    inside = [each for each in members(metric) if hasattr(each, "sync_on_compute")]
    before = [each.sync_on_compute for each in inside]
    turn_synchronisation_off({"": metric})
    try:
        yield
    finally:
        for each, own in zip(inside, before, strict=True):
            each.sync_on_compute = each._to_sync = own
