"""Bookkeeping of the scalars that steps return: kept on the device, averaged by weight, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from drivetrain.core.devices import numbers_on
from drivetrain.core.errors import CheckpointError, NonFiniteError
from drivetrain.distributed.ranks import ALONE, Ranks
from drivetrain.task.output import wide_dtype

FOLD = 128
"""Rows kept before they are folded into sums; bounds the memory of a long log interval."""

_NEVER = 2**62


Row: TypeAlias = tuple[tuple[str, ...], Tensor, float | Tensor]
"""The scalars of one micro-batch: their names; the values, 0-d for a single name, else of shape (names,),
detached; and the weight that they are means over. A plain tuple, because one is made in every step."""


def _sums(names: tuple[str, ...], rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
    """Rows with the same names as one vector on their device: n weighted sums, the weight, n first bad
    steps.
    """
    values = torch.stack([values for _, values, _ in rows]).reshape(len(rows), len(names))
    wide = wide_dtype(values.device)
    weights = _as_column([weight for _, _, weight in rows], values.device, wide)
    numbers = numbers_on(values.device, steps, torch.int64)[:, None]
    bad = torch.where(torch.isfinite(values) | (weights == 0), _NEVER, numbers).amin(0).to(wide)
    # A weight of zero takes nothing from the mean, whatever the value: 0 x NaN would be NaN.
    weighted = torch.where(weights == 0, 0, values.to(wide) * weights).sum(0)
    return torch.cat([weighted, weights.sum()[None], bad])


def _as_column(weights: Sequence[float | Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not any(isinstance(weight, Tensor) for weight in weights):
        return numbers_on(device, weights, dtype)[:, None]  # type: ignore[arg-type]
    placed = [
        each.to(device, dtype).reshape(())
        if isinstance(each, Tensor)
        else torch.full((), each, device=device, dtype=dtype)
        for each in weights
    ]
    return torch.stack(placed)[:, None]


def _added(first: Tensor, second: Tensor) -> Tensor:
    n = len(first) // 2 + 1
    return torch.cat([first[:n] + second[:n], torch.minimum(first[n:], second[n:])])


class MetricBuffer:
    """Weighted means of the scalars that steps return, kept on the device until asked for.

    Args:
        ranks: The processes whose means these are; all of them ask at the same time.

    Attributes:
        measured: What each rank gave `means` beside its scalars; empty for one process.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks
        self._pending: list[tuple[Sequence[Row], int]] = []
        self._folded: dict[tuple[str, ...], Tensor] = {}
        self.measured: list[dict[str, float]] = []

    def add(self, rows: Sequence[Row], step: int) -> None:
        """Keep the scalars of a step's micro-batches; no host sync.

        Args:
            rows: The scalars; the list must not change afterwards.
        """
        self._pending.append((rows, step))
        if len(self._pending) >= FOLD:
            self._fold()

    def _by_names(self) -> dict[tuple[str, ...], tuple[list[Row], list[int]]]:
        groups: dict[tuple[str, ...], tuple[list[Row], list[int]]] = {}
        for rows, step in self._pending:
            for row in rows:
                group = groups.get(row[0])
                if group is None:
                    group = groups[row[0]] = ([], [])
                group[0].append(row)
                group[1].append(step)
        return groups

    def _fold(self) -> None:
        for names, (rows, steps) in self._by_names().items():
            sums = _sums(names, rows, steps)
            self._folded[names] = _added(self._folded[names], sums) if names in self._folded else sums
        self._pending = []

    def means(
        self, refuse_nonfinite: bool = True, beside: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Return the means of everything added since the last reset, by all ranks, in one copy to the host.

        Args:
            refuse_nonfinite: Whether a loss that is NaN or infinite is an error.
            beside: What each rank has measured of itself; becomes rank 0's on all, in the same exchange.
        """
        if not self._folded and self._ranks.alone:
            means = self._plain_means()
            if means is not None:
                return means
        self._fold()
        totals = self._joined(_read_totals([*self._folded.items()]), beside)
        if refuse_nonfinite:
            _refuse_bad(totals, self._ranks.copies)
        return {name: each.mean for name, each in totals.items()}

    def _joined(self, totals: dict[str, Total], beside: dict[str, float] | None = None) -> dict[str, Total]:
        """Return the totals of all ranks, added in their order, so that each rank has the same."""
        joined: dict[str, Total] = {}
        gathered = self._ranks.all_gather((totals, beside))
        for index, (each, _) in enumerate(gathered):
            rank = index * self._ranks.copies
            for name, total in each.items():
                joined[name] = total.on(rank) if name not in joined else joined[name].plus(total.on(rank))
        if beside is not None and len(gathered) > 1:
            self.measured = [dict(each or {}) for _, each in gathered]
        first = gathered[0][1]
        if beside is not None and first is not None and first is not beside:
            beside.clear()
            beside.update(first)
        return joined

    def _plain_means(self) -> dict[str, float] | None:
        """Return the means of a short interval with one set of names and all values finite; None if it is not
        so plain.

        The usual log point, in four tensor operations in place of a dozen: it happens every few dozen
        steps, with everything it touches out of the cache.
        """
        groups = self._by_names()
        if len(groups) != 1:
            return None
        ((names, (rows, _)),) = groups.items()
        weights = [weight for _, _, weight in rows]
        if any(isinstance(weight, Tensor) for weight in weights) or not sum(weights):
            return None
        values = torch.stack([values for _, values, _ in rows])
        if wide_dtype(values.device) is not torch.float64:
            return None
        factors = numbers_on(values.device, weights, torch.float64)  # type: ignore[arg-type]
        sums = (factors @ values.to(torch.float64)).tolist()
        listed = sums if isinstance(sums, list) else [sums]
        if not all(map(math.isfinite, listed)):
            return None
        total = sum(weights)
        return {name: value / total for name, value in zip(names, listed, strict=True)}

    def check(self) -> None:
        """Look for a bad loss of any rank without folding anything, so that looking changes no later sum;
        waits for the device.
        """
        groups = self._by_names().items()
        pending = [(names, _sums(names, rows, steps)) for names, (rows, steps) in groups]
        totals = self._joined(_read_totals([*pending, *self._folded.items()]))
        _refuse_bad(totals, self._ranks.copies)

    def reset(self) -> None:
        self._pending = []
        self._folded = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the pending rows and sums as they are: folding them early would change the order of
        additions.
        """
        groups = [
            {
                "names": list(names),
                "values": torch.stack([values for _, values, _ in rows]),
                "weights": [weight for _, _, weight in rows],
                "steps": steps,
            }
            for names, (rows, steps) in self._by_names().items()
        ]
        folded = [{"names": list(names), "sums": sums} for names, sums in self._folded.items()]
        return {"pending": groups, "adds": len(self._pending), "folded": folded}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Take over what `state_dict` gave."""
        if type(state["adds"]) is not int or not 0 <= state["adds"] <= FOLD:
            raise CheckpointError(f"the checkpoint's logged scalars were added {state['adds']!r} times")
        for each in (*state["pending"], *state["folded"]):
            _check_stored(each)
        self._folded = {tuple(each["names"]): _moved(each["sums"], device) for each in state["folded"]}
        by_step: dict[int, list[Row]] = {}
        for group in state["pending"]:
            names, values = tuple(group["names"]), _moved(group["values"], device).unbind(0)
            for value, weight, step in zip(values, group["weights"], group["steps"], strict=True):
                by_step.setdefault(step, []).append((names, value, weight))
        self._pending = [(rows, step) for step, rows in sorted(by_step.items())]
        # A step adds once, but a generator step may return nothing to add: the count decides when to fold.
        self._pending += [((), 0)] * max(0, state["adds"] - len(self._pending))


def joined_buffers(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of several buffers as that of one."""
    folded: dict[tuple[str, ...], Tensor] = {}
    for state in states:
        for each in state["folded"]:
            names, sums = tuple(each["names"]), each["sums"]
            folded[names] = _added(folded[names], sums) if names in folded else sums
    return {
        "pending": [group for state in states for group in state["pending"]],
        "adds": max(state["adds"] for state in states),
        "folded": [{"names": list(names), "sums": sums} for names, sums in folded.items()],
    }


def _check_stored(group: Mapping[str, Any]) -> None:
    """Check a group of a buffer's state here, since what is wrong would show only where it is next read."""
    names = group["names"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"the checkpoint's logged scalars have the names {str(names)[:80]}")
    if "sums" in group:
        values, shapes = group["sums"], [[2 * len(names) + 1]]
    else:
        count = len(group["weights"])
        values, shapes = group["values"], [[count, len(names)], *([[count]] if len(names) == 1 else [])]
        numbers = (*group["weights"], *group["steps"])
        if not all(isinstance(each, (int, float, Tensor)) for each in numbers):
            raise CheckpointError(f"the checkpoint's weights of {names} are no numbers")
    if not isinstance(values, Tensor) or list(values.shape) not in shapes:
        raise CheckpointError(f"the checkpoint's values of {names} are not of shape {shapes[0]}")


def _moved(tensor: Tensor, device: torch.device | None) -> Tensor:
    if device is None:
        return tensor
    return tensor.to(device, wide_dtype(device) if tensor.dtype is torch.float64 else tensor.dtype)


class Total(NamedTuple):
    """The sums of one name: the weighted sum, the weight, and the first bad step with its rank."""

    value: float
    weight: float
    bad: int = _NEVER
    rank: int = 0

    @property
    def mean(self) -> float:
        """The weighted mean; NaN without any weight."""
        return self.value / self.weight if self.weight else math.nan

    def on(self, rank: int) -> Total:
        """Return the sums, marked as those of a rank."""
        return self._replace(rank=rank)

    def plus(self, other: Total) -> Total:
        bad, rank = min((self.bad, self.rank), (other.bad, other.rank))
        return Total(self.value + other.value, self.weight + other.weight, bad, rank)


def _read_totals(summed: Sequence[tuple[tuple[str, ...], Tensor]]) -> dict[str, Total]:
    """Return the sums by name, in one copy to the host."""
    if not summed:
        return {}
    packed = torch.cat([sums for _, sums in summed]).tolist()
    totals: dict[str, Total] = {}
    at = 0
    for names, _ in summed:
        n = len(names)
        for index, name in enumerate(names):
            first = packed[at + n + 1 + index]
            bad = int(first) if first < _NEVER / 2 else _NEVER
            total = Total(packed[at + index], packed[at + n], bad)
            totals[name] = totals[name].plus(total) if name in totals else total
        at += 2 * n + 1
    return totals


def _refuse_bad(totals: Mapping[str, Total], copies: int) -> None:
    bad = {name: each for name, each in totals.items() if each.bad < _NEVER}
    if any(is_loss(name) for name in bad):
        rank = min((each.bad, each.rank) for each in bad.values())[1]
        raise _nonfinite({name: each.bad for name, each in bad.items()}, rank, copies)


def _nonfinite(bad: Mapping[str, int], rank: int, copies: int = 1) -> NonFiniteError:
    first = min(bad.values())
    where = f"rank {rank}" if copies == 1 else f"ranks {rank} to {rank + copies - 1}"
    names = ", ".join(f"{name!r} (from step {step})" for name, step in sorted(bad.items()))
    return NonFiniteError(
        f"NaN or infinite at step {first} on {where}: {names}",
        "The weights from that step on are not usable; resume from a checkpoint before it. Usual causes:"
        " too high a learning rate, no gradient clipping (max_grad_norm), 16-bit overflow, a division by zero"
        " or a logarithm of zero in the loss",
        first,
    )


def refuse_nonfinite(rows: Iterable[Row], step: int, rank: int = 0) -> None:
    """Check the losses of a step that was skipped, as they enter no average.

    Raises:
        NonFiniteError: One is NaN or infinite, so that no loss scale would have helped.
    """
    flags = [each for names, bad in _bad_values(rows) for each in zip(names, bad.tolist(), strict=True)]
    bad = {name: step for name, flag in flags if flag}
    if any(is_loss(name) for name in bad):
        raise _nonfinite(bad, rank)


def bad_losses(rows: Iterable[Row]) -> list[tuple[str, Tensor]]:
    """Return each loss's name with whether it is NaN or infinite, on its device."""
    found: list[tuple[str, Tensor]] = []
    for names, bad in _bad_values(rows):
        for name, flag in zip(names, bad.unbind(0), strict=True):
            if is_loss(name):
                found.append((name, flag))
    return found


def _bad_values(rows: Iterable[Row]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the names of each row and, for each value, whether it is NaN or infinite. A value of weight zero
    never counts: it is a mean over nothing.
    """
    for names, values, weight in rows:
        if isinstance(weight, Tensor):
            bad = ~torch.isfinite(values.reshape(-1))
            yield names, bad & (weight.to(bad.device) != 0)
        elif weight:
            yield names, ~torch.isfinite(values.reshape(-1))


def is_loss(name: str) -> bool:
    """Return whether a returned value is a loss by its name: "loss", or one that ends in "_loss"."""
    return name == "loss" or name.endswith("_loss")
