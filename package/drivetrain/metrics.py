"""Bookkeeping of the scalars that steps return: read, kept on the device, averaged by weight, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError, ConfigError, NonFiniteError
from drivetrain.types import StepOutput

FOLD = 128
"""Rows kept before they are folded into sums; bounds the memory of a long log interval."""

_NEVER = 2**62


Row: TypeAlias = tuple[tuple[str, ...], Tensor, float | Tensor]
"""The scalars of one micro-batch: their names; the values, 0-d for a single name, else of shape (names,),
detached; and the weight that they are means over. A plain tuple, because one is made in every step."""


StepValues: TypeAlias = tuple[Tensor | None, tuple[str, ...], Tensor | None, Any]
"""A step's return value, taken apart: the scalar to optimise, with its graph (None when a validation step
returned nothing); the names of the scalars to log; those scalars, detached; the model's outputs, or None."""


_LOSS = ("loss",)


def read_output(output: Any) -> StepValues:
    """Take apart what a step returned: a scalar, a mapping with "loss", a `StepOutput`, or None.

    Raises:
        ConfigError: Anything else, a mapping without "loss", a value that is no scalar, or one that is given
            twice; names it.
    """
    outputs = None
    extra: Mapping[str, Any] | None = None
    loss = output
    if isinstance(output, StepOutput):
        loss, outputs, extra = output.loss, output.outputs, output.metrics
        if extra:
            _check_extra(loss, extra)
    if isinstance(loss, Tensor):
        if loss.ndim:
            loss = _scalar("loss", loss)
        if not extra:
            return loss, _LOSS, loss.detach(), outputs
        named = {"loss": loss, **extra}
    elif isinstance(loss, Mapping):
        named = {**loss, **extra} if extra else dict(loss)
        if "loss" not in named:
            raise ConfigError(
                f"a step returned a mapping without 'loss'; it has {', '.join(map(repr, named))}"
            )
        loss = named["loss"]
        if not isinstance(loss, Tensor):
            raise ConfigError(f"a step's 'loss' must be a tensor, not a {type(loss).__name__}")
        if loss.ndim:
            named["loss"] = loss = _scalar("loss", loss)
    elif loss is None:
        return None, tuple(extra or ()), _stacked(extra, None) if extra else None, outputs
    else:
        given = "" if loss is output else "the loss as "
        raise ConfigError(
            f"a step returned {given}a {type(loss).__name__}; allowed are a scalar tensor, a mapping"
            " with 'loss', or a StepOutput"
        )
    return loss, tuple(named), _stacked(named, loss), outputs


def _check_extra(loss: Any, extra: Mapping[str, Any]) -> None:
    taken = loss if isinstance(loss, Mapping) else () if loss is None else _LOSS
    twice = [name for name in extra if name in taken]
    if twice:
        raise ConfigError(
            f"a step returned {', '.join(map(repr, twice))} twice: as StepOutput's loss and among its"
            " metrics. Give the metric another name"
        )


def _stacked(named: Mapping[str, Any], loss: Tensor | None) -> Tensor:
    # Copied at once: a task may go on changing a tensor that it returned.
    with torch.no_grad():
        try:
            stacked = torch.stack(tuple(named.values()))
        except (TypeError, RuntimeError):  # numbers among the tensors, other devices, or shapes such as (1,)
            tensors = (each for each in (loss, *named.values()) if isinstance(each, Tensor))
            device = next((each.device for each in tensors), torch.device("cpu"))
            wide = _wide(device)
            return torch.stack([_scalar(name, value).to(device, wide) for name, value in named.items()])
        if stacked.ndim > 1:  # alike in shape, but no scalars
            return torch.stack([_scalar(name, value) for name, value in named.items()])
        return stacked


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have


def _scalar(name: str, value: Any) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"the value {name!r} that a step returned is a {type(value).__name__}, not a number"
        ) from None
    if tensor.numel() != 1:
        raise ConfigError(
            f"the value {name!r} that a step returned has shape {tuple(tensor.shape)}; only scalars can be "
            "optimised and logged. Take its mean, or return it as StepOutput(outputs=...)"
        )
    return tensor.reshape(())


def _sums(names: tuple[str, ...], rows: Sequence[Row], updates: Sequence[int]) -> Tensor:
    """Rows with the same names as one vector on their device: n weighted sums, the weight, n first bad
    updates.
    """
    values = torch.stack([values for _, values, _ in rows]).reshape(len(rows), len(names))
    wide = _wide(values.device)
    weights = _as_column([weight for _, _, weight in rows], values.device, wide)
    numbers = torch.tensor(updates, device=values.device, dtype=torch.int64)[:, None]
    bad = torch.where(torch.isfinite(values) | (weights == 0), _NEVER, numbers).amin(0).to(wide)
    # A weight of zero takes nothing from the mean, whatever the value: 0 x NaN would be NaN.
    weighted = torch.where(weights == 0, 0, values.to(wide) * weights).sum(0)
    return torch.cat([weighted, weights.sum()[None], bad])


def _as_column(weights: Sequence[float | Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if any(isinstance(weight, Tensor) for weight in weights):
        return torch.stack([torch.as_tensor(w, device=device, dtype=dtype).reshape(()) for w in weights])[
            :, None
        ]
    return torch.tensor(weights, device=device, dtype=dtype)[:, None]


def _added(first: Tensor, second: Tensor) -> Tensor:
    n = len(first) // 2 + 1
    return torch.cat([first[:n] + second[:n], torch.minimum(first[n:], second[n:])])


class MetricBuffer:
    """Weighted means of the scalars that steps return, kept on the device until asked for.

    Args:
        rank: This process's rank, for messages.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._pending: list[tuple[Sequence[Row], int]] = []
        self._folded: dict[tuple[str, ...], Tensor] = {}

    def add(self, rows: Sequence[Row], update: int) -> None:
        """Keep the scalars of an update's micro-batches; no host sync.

        Args:
            rows: The scalars; the list must not change afterwards.
            update: The update they belong to, for messages.
        """
        self._pending.append((rows, update))
        if len(self._pending) >= FOLD:
            self._fold()

    def _by_names(self) -> dict[tuple[str, ...], tuple[list[Row], list[int]]]:
        groups: dict[tuple[str, ...], tuple[list[Row], list[int]]] = {}
        for rows, update in self._pending:
            for row in rows:
                group = groups.get(row[0])
                if group is None:
                    group = groups[row[0]] = ([], [])
                group[0].append(row)
                group[1].append(update)
        return groups

    def _fold(self) -> None:
        for names, (rows, updates) in self._by_names().items():
            sums = _sums(names, rows, updates)
            self._folded[names] = _added(self._folded[names], sums) if names in self._folded else sums
        self._pending = []

    def means(self, refuse_nonfinite: bool = True) -> dict[str, float]:
        """The means of everything added since the last reset, in one copy to the host.

        Args:
            refuse_nonfinite: Whether a loss that is NaN or infinite is an error.

        Raises:
            NonFiniteError: A loss was NaN or infinite; names the first such update and all bad values.
        """
        if not self._folded:
            means = self._plain_means()
            if means is not None:
                return means
        self._fold()
        means, bad = _read_sums(self._folded)
        if refuse_nonfinite and any(is_loss(name) for name in bad):
            raise _nonfinite(bad, self._rank)
        return means

    def _plain_means(self) -> dict[str, float] | None:
        """The means of a short interval with one set of names and all values finite; None if it is not so
        plain.

        The usual log point, in four tensor operations in place of a dozen: it happens every few dozen
        updates, with everything it touches out of the cache.
        """
        groups = self._by_names()
        if len(groups) != 1:
            return None
        ((names, (rows, _)),) = groups.items()
        weights = [weight for _, _, weight in rows]
        if any(isinstance(weight, Tensor) for weight in weights) or not sum(weights):
            return None
        values = torch.stack([values for _, values, _ in rows])
        if values.device.type == "mps":  # no float64 there
            return None
        factors = torch.tensor(weights, device=values.device, dtype=torch.float64)
        sums = (factors @ values.to(torch.float64)).tolist()
        listed = sums if isinstance(sums, list) else [sums]
        if not all(map(math.isfinite, listed)):
            return None
        total = sum(weights)
        return {name: value / total for name, value in zip(names, listed, strict=True)}

    def check(self) -> None:
        """Look for a bad loss without folding anything, so that looking changes no later sum; waits for the
        device.

        Raises:
            NonFiniteError: A loss since the last reset was NaN or infinite.
        """
        groups = self._by_names().items()
        bad = _read_sums({names: _sums(names, rows, updates) for names, (rows, updates) in groups})[1]
        for name, update in _read_sums(self._folded)[1].items():
            bad[name] = min(bad.get(name, _NEVER), update)
        if any(is_loss(name) for name in bad):
            raise _nonfinite(bad, self._rank)

    def reset(self) -> None:
        """Forget everything added."""
        self._pending = []
        self._folded = {}

    def state_dict(self) -> dict[str, Any]:
        """The pending rows and sums as they are: folding them early would change the order of additions."""
        groups = [
            {
                "names": list(names),
                "values": torch.stack([values for _, values, _ in rows]),
                "weights": [weight for _, _, weight in rows],
                "updates": updates,
            }
            for names, (rows, updates) in self._by_names().items()
        ]
        folded = [{"names": list(names), "sums": sums} for names, sums in self._folded.items()]
        return {"pending": groups, "adds": len(self._pending), "folded": folded}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Take over what `state_dict` gave.

        Raises:
            CheckpointError: It is not that.
        """
        if type(state["adds"]) is not int or not 0 <= state["adds"] <= FOLD:
            raise CheckpointError(f"the checkpoint's logged scalars were added {state['adds']!r} times")
        for each in (*state["pending"], *state["folded"]):
            _check_stored(each)
        self._folded = {tuple(each["names"]): _moved(each["sums"], device) for each in state["folded"]}
        by_update: dict[int, list[Row]] = {}
        for group in state["pending"]:
            names, values = tuple(group["names"]), _moved(group["values"], device).unbind(0)
            for value, weight, update in zip(values, group["weights"], group["updates"], strict=True):
                by_update.setdefault(update, []).append((names, value, weight))
        self._pending = [(rows, update) for update, rows in sorted(by_update.items())]
        # An update adds once, but a generator step may return nothing to add: the count decides when to fold.
        self._pending += [((), 0)] * (state["adds"] - len(self._pending))


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
        numbers = (*group["weights"], *group["updates"])
        if not all(isinstance(each, (int, float, Tensor)) for each in numbers):
            raise CheckpointError(f"the checkpoint's weights of {names} are no numbers")
    if not isinstance(values, Tensor) or list(values.shape) not in shapes:
        raise CheckpointError(f"the checkpoint's values of {names} are not of shape {shapes[0]}")


def _moved(tensor: Tensor, device: torch.device | None) -> Tensor:
    if device is None:
        return tensor
    return tensor.to(device, _wide(device) if tensor.dtype is torch.float64 else tensor.dtype)


def _read_sums(folded: Mapping[tuple[str, ...], Tensor]) -> tuple[dict[str, float], dict[str, int]]:
    """Means by name, and the first bad update of each value that was NaN or infinite, in one copy to the
    host.
    """
    if not folded:
        return {}, {}
    packed = torch.cat(list(folded.values())).tolist()
    totals: dict[str, list[float]] = {}
    bad: dict[str, int] = {}
    at = 0
    for names in folded:
        n = len(names)
        for index, name in enumerate(names):
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += packed[at + index]
            total[1] += packed[at + n]
            first = packed[at + n + 1 + index]
            if first < _NEVER / 2:
                bad[name] = min(bad.get(name, _NEVER), int(first))
        at += 2 * n + 1
    return {name: total / weight if weight else math.nan for name, (total, weight) in totals.items()}, bad


def _nonfinite(bad: Mapping[str, int], rank: int) -> NonFiniteError:
    first = min(bad.values())
    names = ", ".join(f"{name!r} (from update {update})" for name, update in sorted(bad.items()))
    return NonFiniteError(
        f"NaN or infinite at update {first} on rank {rank}: {names}. The weights from that update on are not"
        " usable; resume from a checkpoint before it. Usual causes: too high a learning rate, no gradient"
        " clipping (max_grad_norm), 16-bit overflow, a division by zero or a logarithm of zero in the loss"
    )


def refuse_nonfinite(rows: Iterable[Row], update: int, rank: int = 0) -> None:
    """Check the losses of an update that was skipped, as they enter no average.

    Raises:
        NonFiniteError: One is NaN or infinite, so that no loss scale would have helped.
    """
    bad = {}
    for names, values, _ in rows:
        listed = values.reshape(-1).tolist()
        bad.update(
            {name: update for name, value in zip(names, listed, strict=True) if not math.isfinite(value)}
        )
    if any(is_loss(name) for name in bad):
        raise _nonfinite(bad, rank)


def is_loss(name: str) -> bool:
    """Whether a returned value is a loss by its name: "loss", or one that ends in "_loss"."""
    return name == "loss" or name.endswith("_loss")
