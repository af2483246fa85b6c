"""The states of torchmetrics-style objects: read, written, and joined over the processes of a job.

torchmetrics synchronises by itself, but needs every process to update every metric in the same way: a process
without samples would deadlock the others. So its synchronisation is turned off here, and the states of the
processes are joined by each metric's declared reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.core.errors import ConfigError
from drivetrain.distributed.ranks import Ranks

State = dict[str, Any]


def parts(metric: Any) -> list[Any]:
    """Return the metrics of a collection, or the only one."""
    # A torchmetrics collection shares states between its members; taken one by one each is whole.
    if isinstance(metric, torch.nn.ModuleDict):
        try:
            return list(metric.values(copy_state=False))  # type: ignore[call-arg]
        except TypeError:
            return list(metric.values())
    return [metric]


def members(metric: Any) -> list[Any]:
    """Return a metric and those inside of it: wrappers hold theirs as submodules, and a collection may be
    among them. None of one that is no module.
    """
    if not isinstance(metric, torch.nn.Module):
        return []
    return [member for part in parts(metric) for member in part.modules()]


def turn_synchronisation_off(metrics: Mapping[str, Any]) -> None:
    """Have metrics compute from what is here, also where torch.distributed has a group: not all of its
    processes need be in the run, nor can it take tensors of every device.
    """
    for metric in metrics.values():
        for each in _owners([metric]):
            each.sync_on_compute = False
            each._to_sync = False


def check_joinable(metrics: Mapping[str, Any]) -> None:
    """Check that the states of several processes can be joined."""
    for name, metric in metrics.items():
        if not _owners([metric]):
            raise ConfigError(
                f"the metric {name!r} ({type(metric).__name__}) does not tell how its states are joined over"
                " processes. Make it a torchmetrics.Metric, whose add_state(..., dist_reduce_fx=...) tells"
                " it, or train in one process"
            )


@contextmanager
def joined_states(metrics: Sequence[Any], updated: bool, ranks: Ranks) -> Iterator[bool]:
    """Give the metrics the states of all ranks together, and their own ones back afterwards.

    Args:
        metrics: The same on every rank.
        updated: Whether this rank updated them.
        ranks: Of which those that updated them count.

    Yields:
        Whether any rank did.
    """
    owners = _owners(metrics)
    before = registered_states(metrics)
    sent = [{name: _on_host(value) for name, value in each.items()} for each in before]
    gathered = [each for each in ranks.all_gather(sent if updated else None) if each is not None]
    counts = [each._update_count for each in owners]
    try:
        if gathered:
            take_joined(metrics, gathered)
        yield bool(gathered)
    finally:
        for owner, state, count in zip(owners, before, counts, strict=True):
            _take(owner, state)
            owner._update_count = count


def registered_states(metrics: Sequence[Any]) -> list[State]:
    """Return the states that a list of metrics, and those inside of them, have registered."""
    return [{name: getattr(each, name) for name in each._defaults} for each in _owners(metrics)]


def take_joined(metrics: Sequence[Any], states: Sequence[Sequence[State]]) -> None:
    """Give the metrics what several had, each as `registered_states` gave it."""
    for number, owner in enumerate(_owners(metrics)):
        own = [each[number] for each in states]
        _take(owner, {name: _join(owner, name, own) for name in own[0]})
        owner._update_count = max(1, owner._update_count)


def _owners(metrics: Sequence[Any]) -> list[Any]:
    return [each for metric in metrics for each in members(metric) if hasattr(each, "_reductions")]


def _on_host(value: Any) -> Any:
    return [each.detach().cpu() for each in value] if isinstance(value, list) else value.detach().cpu()


def _take(member: Any, state: State) -> None:
    for name, value in state.items():
        setattr(member, name, value)
    member._computed = None  # what it last computed, of another state


def _join(member: Any, name: str, states: Sequence[State]) -> Any:
    values, reduction = [each[name] for each in states], member._reductions[name]
    if isinstance(values[0], list):
        return [each.to(member.device) for value in values for each in value]
    tensors: list[Tensor] = [each.to(member.device) for each in values]
    if len(tensors) == 1:
        return tensors[0]
    stacked = torch.stack(tensors)
    return reduction(stacked) if callable(reduction) else stacked
