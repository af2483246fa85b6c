"""How weights of 16 bits take updates that are smaller than the distance to their next number.

bfloat16 keeps 8 bits of a number: next to 1.0 stands 0.996, and an update of 0.0001 that is rounded to the
nearest leaves 1.0 what it was, at every update. So the optimizer computes in float32, on copies of the
weights, and its state is float32. What it gives is rounded

- to either neighbour at random, as often as it is near to it, so that the mean is exact ("stochastic"; Gupta
  et al., "Deep Learning with Limited Numerical Precision", ICML 2015; for bfloat16 Zamirai et al.,
  "Revisiting BFloat16 Training", arXiv 2010.06192);
- or to the nearest, while the copies are kept from update to update ("master"; Micikevicius et al., "Mixed
  Precision Training", arXiv 1710.03740).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from drivetrain.errors import ConfigError
from drivetrain.float32_copies import Copies, KeptCopies, PassingCopies, of_16_bits, place_of
from drivetrain.muon import CombinedOptimizer, Muon
from drivetrain.optimizer_state import WEIGHT_UPDATES
from drivetrain.progress import Progress
from drivetrain.streams import ROUNDING, mix

PIECE = 2**26
"""How many weights are updated at once where the optimizer allows it. Beside its state an update needs 8
bytes for each of them, and up to 14 while they are rounded."""

PIECE_ON_CPU = 2**20
"""The same where a piece had better stay in the processor's caches."""

TURNS = 128
"""For how many updates a weight's random numbers are spread evenly. Then they begin anew, so that updates
which recur, as after each epoch, do not meet the same ones."""

KINDS: dict[str, type[Copies]] = {"stochastic": PassingCopies, "master": KeptCopies}


class WeightUpdates:
    """Has optimizers of 16-bit weights compute in float32.

    Args:
        kind: "stochastic", "master" or "nearest"; the last leaves optimizers as they are.
        seed: The run's, from which stochastic rounding draws.
        progress: The run's; with the seed and the update's number a resumed run draws the same.
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
        """Within it a module has float32 copies of its 16-bit weights, on which an optimizer is to be made.

        So the optimizer chooses its settings and kernels, and makes its first state, for float32. Given it,
        what this yields puts the module's own weights into its groups and makes its steps those of 16 bits.

        Args:
            module: Whose parameters the optimizer trains, where they are trained.
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
    """Where a module has trained weights of 16 bits: the module that holds one, its name there, and it."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and of_16_bits(parameter):
                yield owner, name, parameter


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    copy = nn.Parameter(parameter.detach().float())
    copy.__dict__.update(parameter.__dict__)  # what a user has noted there, to choose groups by
    return copy


class _Piece(NamedTuple):
    """What is updated at once.

    Attributes:
        copies: Of its 16-bit weights, of which those of one place are together.
        groups: For each of the optimizer's groups the copies, and parameters that need none.
    """

    copies: list[Copies]
    groups: list[list[nn.Parameter]]


class _Steps:
    """The steps of one optimizer, in float32.

    Args:
        optimizer: Its groups hold the module's own parameters; its state goes by them, too.
        kind: One of `KINDS`.
        keys: What its random numbers begin with.
        progress: Of the run.
        size: How many weights to update at once; None for what suits the device.
    """

    def __init__(
        self, optimizer: Optimizer, kind: str, keys: tuple[int, ...], progress: Progress, size: int | None
    ) -> None:
        self._optimizer = optimizer
        self._inner: Callable[[], Any] = optimizer.step
        self._kind = kind
        self._keys = keys
        self._progress = progress
        self._size = size
        self._members: list[list[int]] = []
        self._pieces: list[_Piece] = []
        self._generators: dict[torch.device, torch.Generator] = {}
        self._last = (-1, 0)
        for group in optimizer.param_groups:
            group[WEIGHT_UPDATES] = kind

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all weights.

        Raises:
            ConfigError: A closure, whose loss would be that of other weights than the optimizer's.
        """
        if closure is not None:
            raise ConfigError("an optimizer of 16-bit weights takes no closure: call step() without one")
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        own = [group["params"] for group in groups]
        members = [[id(each) for each in group] for group in own]
        if members != self._members:
            self._pieces, self._members = self._lay_out(own), members
        update = self._progress.updates
        self._last = (update, self._last[1] + 1 if self._last[0] == update else 0)
        try:
            for number, piece in enumerate(self._pieces):
                try:
                    for copies in piece.copies:
                        copies.take(optimizer)
                    for group, given in zip(groups, piece.groups, strict=True):
                        group["params"] = given
                    self._inner()
                finally:
                    for copies in piece.copies:
                        copies.hand_back(optimizer)
                for place, copies in enumerate(piece.copies):
                    copies.round(self._generator(copies, number, place), update % TURNS)
        finally:
            for group, given in zip(groups, own, strict=True):
                group["params"] = given

    def _generator(self, copies: Copies, number: int, place: int) -> torch.Generator:
        """Seeded anew after some updates, and for each step of one; alike for the same share of weights."""
        device, (update, times) = copies.device, self._last
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        share = (each + 1 for each in copies.share)
        seed = mix(ROUNDING, *self._keys, update // TURNS, times, number, place, *share)
        return self._generators[device].manual_seed(seed)

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[_Piece]:
        """Divide the weights into pieces; parameters that are not of 16 bits are updated with the first.

        An optimizer that may count something for all of its parameters is given all of them at once.
        """
        by_parameter = _by_parameter(self._optimizer)
        held: list[dict[Any, list[tuple[int, nn.Parameter]]]] = [{}]
        total = 0
        for index, group in enumerate(groups):
            for parameter in group:
                if not of_16_bits(parameter):
                    continue
                count = parameter.numel()
                size = self._size or (PIECE_ON_CPU if parameter.device.type == "cpu" else PIECE)
                if by_parameter and total and total + count > size:
                    held.append({})
                    total = 0
                total += count
                held[-1].setdefault(place_of(parameter), []).append((index, parameter))
        pieces = []
        for number, places in enumerate(held):
            given: list[list[nn.Parameter]] = [
                [each for each in group if not number and not of_16_bits(each)] for group in groups
            ]
            made = []
            for each in places.values():
                made.append(KINDS[self._kind]([parameter for _, parameter in each]))
                for (index, _), copy in zip(each, made[-1].copies, strict=True):
                    given[index].append(copy)
            pieces.append(_Piece(made, given))
        return pieces


def _by_parameter(optimizer: Optimizer) -> bool:
    """Whether it may be given its parameters part by part, as torch's own, which count for each by itself."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(map(_by_parameter, optimizer.parts))
    return isinstance(optimizer, Muon) or type(optimizer).__module__.startswith("torch.optim.")
