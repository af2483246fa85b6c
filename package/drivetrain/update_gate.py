"""Updates that are not made: what is asked before an optimizer's step, and how nothing is left of the update.

Everything is undone by not doing it: weights, the optimizer's state and its counts are not touched, so that
they stay what they were to the last bit, whatever the optimizer. Only forward has changed something by then:
buffers, such as the running means of batch norm. They are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.errors import NonFiniteError
from drivetrain.kept_buffers import KeptBuffers
from drivetrain.metrics import Row, is_loss
from drivetrain.module_state import parameter_names
from drivetrain.updates import Updater

if TYPE_CHECKING:
    from drivetrain.engine import Engine

_LOG = logging.getLogger(__name__)

IN_A_ROW = 100
"""Updates in a row that are not made for a NaN or an infinity, after which the run ends with an error."""

Refusal = Callable[[Updater, Sequence[Row]], bool]
"""Whether an update is not to be made, given its optimizer and the scalars of its micro-batches. It is asked
on all ranks together, and answers alike on all."""


class UpdateGate:
    """Asks before each step of an optimizer whether the update is to be made.

    Args:
        task: Whose buffers are put back after an update that was not.
    """

    def __init__(self, task: nn.Module) -> None:
        self._refusals: list[Refusal] = []
        self._task = task
        self._buffers = KeptBuffers()

    def add(self, refusal: Refusal) -> None:
        """Ask this, too; after those that were added before, if none of them refuses."""
        self._refusals.append(refusal)

    def begin(self) -> None:
        """Before the forward of an update; of a generator step also after each optimizer's step."""
        self._buffers.keep(self._task)

    def refuses(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """Whether the update is not to be made; then the buffers are as they were at `begin`."""
        refused = any(each(updater, rows) for each in self._refusals)
        if refused:
            self._buffers.put_back()
        return refused


class SkipNonFinite:
    """Refuses the update of a loss or a gradient that is NaN or infinite, on whichever rank.

    Whether there is one is found on the device, over all losses and gradients, and added up over the ranks
    there. Then the host reads one number: what comes next, the schedule, the random streams, the counts and
    the averages, depends on whether the update was made. Under a loss scale, which looks at the gradients and
    skips by itself, only losses are looked at, so that a bad batch does not lower the scale.

    Args:
        engine: The run's.
        explain: Given an update, says more of what was found in it, if anything is known.
    """

    def __init__(self, engine: Engine, explain: Callable[[int], str]) -> None:
        self._engine = engine
        self._explain = explain
        self._in_a_row: dict[str, int] = {}

    def __call__(self, updater: Updater, rows: Sequence[Row]) -> bool:
        """See `Refusal`.

        Raises:
            NonFiniteError: It was the last of too many in a row.
        """
        engine = self._engine
        flags = [flag for _, flag in _bad_losses(rows)]
        if not engine.precision.loss_scaling:
            flags += [~finite.all() for finite in finite_gradients(updater.parameters)]
        found = torch.zeros((), device=engine.device)
        for each in flags:
            found += each.to(engine.device)
        if not bool(engine.ranks.add(found)):
            self._in_a_row.pop(updater.name, None)
            return False
        count = self._in_a_row[updater.name] = self._in_a_row.get(updater.name, 0) + 1
        what = self._tell(updater, rows)
        if count >= IN_A_ROW:
            raise NonFiniteError(
                f"{count} updates in a row were not made, number {engine.progress.updates} each time, as a"
                f" loss or gradient was NaN or infinite; the last: {what or 'on another rank'}",
                "The weights are those of before. Look at the data from there on, and at the loss",
            )
        return True

    def _tell(self, updater: Updater, rows: Sequence[Row]) -> str:
        """Say what was found here; the update is lost, so that looking closer costs nothing more."""
        engine = self._engine
        update, rank = engine.progress.updates, engine.strategy.rank
        losses = dict.fromkeys(repr(name) for name, flag in _bad_losses(rows) if bool(flag))
        what = f"NaN or infinite on rank {rank}: {', '.join(losses)}" if losses else ""
        if not losses and rank == 0:
            names = list(_bad_gradients(engine.task, updater.parameters))
            listed = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if names[4:] else "")
            what = f"NaN or infinite: the gradient of {listed}" if names else ""
        more = self._explain(update)
        if what or more:
            _LOG.warning("update %d was not made: %s", update, "; ".join(filter(None, (what, more))))
        return what

    def state_dict(self) -> dict[str, int]:
        """How many were not made in a row, by optimizer."""
        return dict(self._in_a_row)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take over what `state_dict` gave, or None."""
        self._in_a_row = {str(name): int(each) for name, each in (state or {}).items()}


def _bad_losses(rows: Sequence[Row]) -> Iterator[tuple[str, Tensor]]:
    """Whether each loss is NaN or infinite; one of weight zero, a mean over nothing, does not count."""
    for names, values, weight in rows:
        if not isinstance(weight, Tensor) and not weight:
            continue
        bad = ~torch.isfinite(values.reshape(-1))
        if isinstance(weight, Tensor):
            bad = bad & (weight.to(bad.device) != 0)
        for name, flag in zip(names, bad.unbind(0), strict=True):
            if is_loss(name):
                yield name, flag


def _bad_gradients(task: nn.Module, parameters: Sequence[Tensor]) -> Iterator[str]:
    names: Mapping[Any, str] = parameter_names(task)
    for each in parameters:
        if not all(bool(finite.all()) for finite in finite_gradients([each])):
            yield names.get(each, "?")


def finite_gradients(parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """For the gradients of each device and dtype, whether each is finite; of sharded ones, what is here."""
    return all_finite([each.grad for each in parameters if each.grad is not None])


def all_finite(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """For the tensors of each device and dtype, a vector that says of each whether all its numbers are
    finite; without a wait for the device.

    On GPUs the largest magnitude tells: unlike the sum of squares it does not overflow, and torch's passes
    NaN on, which that of other devices (XLA) may lose.
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        local = local._values() if local.layout is torch.sparse_coo else local
        if local.is_complex():  # the magnitude of a finite one may overflow
            local = torch.view_as_real(local.detach().resolve_conj())
        if local.numel() and local.is_floating_point() and local.itemsize > 1:
            groups.setdefault((local.device, local.dtype), []).append(local.detach())
    for (device, _), group in groups.items():
        if device.type == "cpu":
            yield _finite_on_cpu(group)
        elif device.type == "cuda":
            yield torch.isfinite(torch.stack(torch._foreach_norm(group, torch.inf)))
        else:
            yield torch.stack([torch.isfinite(each).all() for each in group])


def _finite_on_cpu(group: Sequence[Tensor]) -> Tensor:
    """Whether each is. On a CPU torch adds up some forty times as fast as it compares, and a finite sum has
    finite summands only; one that is not may have overflowed.
    """
    finite = torch.isfinite(torch.stack([each.sum() for each in group]))
    if finite.all():
        return finite
    return torch.stack([torch.isfinite(each).all() for each in group])
