"""Updates of 16-bit weights that are smaller than the distance to their next number.

bfloat16 keeps 8 bits of a number: next to 1.0 stands 0.996, and an update of 0.0001 that is rounded to the
nearest leaves 1.0 unchanged at every update. So the optimizer computes in float32, on copies of the weights,
and its state is float32. The result is rounded

- to either neighbour at random, as often as it is near to it, so that the mean is exact ("stochastic"; Gupta
  et al., "Deep Learning with Limited Numerical Precision", ICML 2015; for bfloat16 Zamirai et al.,
  "Revisiting BFloat16 Training", arXiv 2010.06192);
- or to the nearest, while the copies are kept from update to update ("master"; Micikevicius et al., "Mixed
  Precision Training", arXiv 1710.03740).

torchao rounds at random too, in a private function for bfloat16 alone that draws from the default generator;
here the draws are a function of seed and update, and float16 is served.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.errors import ConfigError
from drivetrain.muon import CombinedOptimizer, Muon
from drivetrain.optimizer_state import MASTER, WEIGHT_UPDATES
from drivetrain.progress import Progress
from drivetrain.streams import ROUNDING, mix

PIECE = 2**26
"""Weights that are updated at once where the optimizer allows it: the float32 copies of one piece, and of its
gradients, are all that an update needs beside its state."""

PIECE_ON_CPU = 2**20
"""The same on a CPU, where a piece should stay in the caches."""

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that a dtype has no room for."""


class WeightUpdates:
    """Lets optimizers of 16-bit weights compute in float32.

    Args:
        kind: "stochastic", "master" or "nearest"; the last leaves optimizers as they are.
        seed: The run's seed, from which stochastic rounding draws.
        progress: The run's progress; with the seed and the update's number a resumed run draws the same.
        piece: How many weights to update at once; None for `PIECE`, or `PIECE_ON_CPU`.
    """

    def __init__(
        self, kind: str, seed: int = 0, progress: Progress | None = None, piece: int | None = None
    ) -> None:
        self._kind = kind
        self._seed = seed
        self._progress = progress or Progress()
        self._piece = piece
        self._made = 0

    @contextmanager
    def building(self, module: nn.Module) -> Iterator[Callable[[Optimizer], Optimizer]]:
        """Give a module float32 copies of its 16-bit weights, on which an optimizer is to be made.

        So the optimizer chooses its settings and kernels, and makes its first state, for float32. The
        function that this yields puts the module's weights into the optimizer's groups and makes its steps
        those of 16 bits.

        Args:
            module: The module whose parameters the optimizer trains, where they are trained.
        """
        found = [] if self._kind == "nearest" else list(_places(module))
        places = [each for each in found if not is_lazy(each[2])]  # those have no values to copy yet
        copies = {own: _copy(own) for own in dict.fromkeys(own for _, _, own in places)}
        try:
            for owner, name, own in places:
                owner._parameters[name] = copies[own]
            yield functools.partial(self._finish, copies) if found else _as_it_is
        finally:
            for owner, name, own in places:
                owner._parameters[name] = own

    def _finish(self, copies: dict[nn.Parameter, nn.Parameter], optimizer: Optimizer) -> Optimizer:
        originals = {copy: own for own, copy in copies.items()}
        for group in optimizer.param_groups:
            group["params"] = [originals.get(each, each) for each in group["params"]]
        for copy, own in originals.items():
            if copy in optimizer.state:
                optimizer.state[own] = optimizer.state.pop(copy)
        keys = (self._seed, self._made)
        self._made += 1
        steps = _Steps(optimizer, self._kind, keys, self._progress, self._piece)
        # The instance's, as torch's schedules do it, and with the marks that they look for.
        replaced: Any = functools.wraps(optimizer.step)(functools.partial(steps.step))
        optimizer.step = replaced  # type: ignore[method-assign]
        return optimizer


def _as_it_is(optimizer: Optimizer) -> Optimizer:
    return optimizer


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the trained 16-bit weights of a module: the module that holds each, its name there, and it."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.dtype in _DROPPED:
                yield owner, name, parameter


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(parameter.detach().float())
    copy.__dict__.update(parameter.__dict__)  # what a user has noted there, to choose groups by
    return copy


class _Steps:
    """The steps of one optimizer, in float32.

    Args:
        optimizer: The optimizer; its groups and its state have the module's own parameters.
        kind: "stochastic" or "master".
        keys: The beginning of the keys of its random numbers.
        progress: The run's progress.
        size: How many weights to update at once; None for what suits the device.
    """

    def __init__(
        self, optimizer: Optimizer, kind: str, keys: tuple[int, ...], progress: Progress, size: int | None
    ) -> None:
        self._optimizer = optimizer
        self._inner: Callable[[], Any] = optimizer.step
        self._keeps = kind == "master"
        self._keys = keys
        self._progress = progress
        self._size = size
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._last_kept: dict[nn.Parameter, tuple[Tensor, int]] = {}
        self._last = (-1, 0)
        for group in optimizer.param_groups:
            group[WEIGHT_UPDATES] = kind

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all weights once.

        Raises:
            ConfigError: A closure, whose loss would be that of other weights than the optimizer's.
        """
        if closure is not None:
            raise ConfigError("an optimizer of 16-bit weights takes no closure: call step() without one")
        groups = self._optimizer.param_groups
        own = [group["params"] for group in groups]
        update = self._progress.updates
        self._last = (update, self._last[1] + 1 if self._last[0] == update else 0)
        try:
            for number, piece in enumerate(self._pieces(own)):
                self._step_piece(number, piece)
        finally:
            for group, given in zip(groups, own, strict=True):
                group["params"] = given

    def _step_piece(self, number: int, piece: Sequence[Sequence[nn.Parameter]]) -> None:
        state = self._optimizer.state
        copies: dict[nn.Parameter, nn.Parameter] = {}
        try:
            for group, members in zip(self._optimizer.param_groups, piece, strict=True):
                for own in members:
                    if own.dtype in _DROPPED:
                        copies[own] = self._taken(own)
                group["params"] = [copies.get(each, each) for each in members]
            self._inner()
        finally:
            for own, copy in copies.items():
                copy.grad = None
                if copy in state:
                    state[own] = state.pop(copy)
                if self._keeps:
                    state[own][MASTER] = copy.detach()
        for place, members in enumerate(_by_place(copies)):
            sources = [_local(copies[own].detach()) for own in members]
            if not self._keeps:
                generator = self._generator(members[0], number, place)
                sources = _rounded_at_random(sources, members[0].dtype, generator)
            torch._foreach_copy_([_local(own) for own in members], sources)
        for own, copy in copies.items():
            if self._keeps:
                self._last_kept[own] = state[own][MASTER], _local(own)._version
            elif hasattr(own, "to_local"):
                del self._copies[own]
            else:
                copy.data = copy.new_empty(0)  # the memory of one piece serves the next

    def _taken(self, own: nn.Parameter) -> nn.Parameter:
        """Return the float32 copy of a weight, with its gradient and the optimizer's state."""
        state = self._optimizer.state
        slots = state.pop(own, None)
        kept = None if slots is None else slots.pop(MASTER, None)
        last, version = self._last_kept.get(own, (None, -1))
        value = own.detach().float() if kept is None else kept
        # A weight that was written to since counts where it differs from its rounded copy.
        if kept is not None and (kept is not last or _local(own)._version != version):
            value = torch.where(own == kept.to(own.dtype), kept, own.float())
        copy = self._copies.get(own)
        if copy is None or hasattr(own, "to_local"):  # a DTensor keeps its values when `data` is set
            copy = self._copies[own] = nn.Parameter(value)
            copy.__dict__.update(own.__dict__)
        else:
            copy.data = value
        if own.grad is not None:
            copy.grad = own.grad.float()
        if slots is not None:
            state[copy] = slots
        return copy

    def _generator(self, weight: Tensor, number: int, place: int) -> torch.Generator:
        """Return a piece's generator, the same on ranks with the same share of the weights."""
        update, times = self._last
        seed = mix(
            ROUNDING, *self._keys, update, times, number, place, *(each + 1 for each in _share(weight))
        )
        return torch.Generator(_local(weight).device).manual_seed(seed)

    def _pieces(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[list[nn.Parameter]]]:
        """Divide the weights of the groups into pieces; other parameters are updated with the first.

        An optimizer that may count something for all of its parameters is given all of them at once.
        """
        divides = _by_parameter(self._optimizer)
        pieces: list[list[list[nn.Parameter]]] = [[[] for _ in groups]]
        total = 0
        for index, group in enumerate(groups):
            for parameter in group:
                if parameter.dtype not in _DROPPED:
                    pieces[0][index].append(parameter)
                    continue
                size = self._size or (PIECE_ON_CPU if parameter.device.type == "cpu" else PIECE)
                if divides and total and total + parameter.numel() > size:
                    pieces.append([[] for _ in groups])
                    total = 0
                total += parameter.numel()
                pieces[-1][index].append(parameter)
        return pieces


def _by_parameter(optimizer: Optimizer) -> bool:
    """Whether it may be given its parameters part by part, as torch's own, which count for each by itself."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(map(_by_parameter, optimizer.parts))
    return isinstance(optimizer, Muon) or type(optimizer).__module__.startswith("torch.optim.")


def _by_place(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group weights that can be rounded together: of one device, one dtype, and one share of the shards."""
    found: dict[Any, list[nn.Parameter]] = {}
    for each in weights:
        found.setdefault((each.device, each.dtype, _share(each)), []).append(each)
    return list(found.values())


def _share(parameter: Tensor) -> tuple[int, ...]:
    """Return which share of a sharded parameter is here: the same on ranks that have the same numbers."""
    if not hasattr(parameter, "placements"):
        return ()
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return tuple(
        -1 if placement.is_replicate() else index
        for index, placement in zip(mesh.get_coordinate(), parameter.placements, strict=True)
    )


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is here, in its own memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _rounded_at_random(
    sources: Sequence[Tensor], dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Return tensors whose numbers are rounded by `round_at_random_`, in one pass over all of them."""
    flat = torch.cat([each.reshape(-1) for each in sources])
    round_at_random_(flat, dtype, generator)
    parts = torch.split(flat, [each.numel() for each in sources])
    return [part.view(each.shape) for part, each in zip(parts, sources, strict=True)]


def round_at_random_(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Round float32 numbers to ones that a dtype of 16 bits has, in place.

    Each becomes one of its two neighbours there, as often as it is near to it, so that the mean is the number
    itself: a random number is added to the bits that the dtype has no room for, and these are cut off.
    Numbers that the dtype has stay as they are, and NaN and infinity become NaN. Numbers of float16 below
    6e-5, whose distance is 6e-8, are left to be rounded to the nearest.

    Args:
        values: Numbers of float32, in one piece of memory.
        dtype: bfloat16 or float16.
        generator: The generator to draw from, on the same device.
    """
    dropped = _DROPPED[dtype]
    nothing = values * 0  # NaN where there is none to round: its bits could become those of a zero
    bits = values.view(torch.int32)
    bits.add_(torch.empty_like(bits).random_(0, 1 << dropped, generator=generator))
    bits.bitwise_and_(-1 << dropped)
    values.add_(nothing)
