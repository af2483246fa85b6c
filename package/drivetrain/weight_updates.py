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
import itertools
from collections.abc import Callable, Iterator, Sequence
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

_ALIGNED = 16
"""Tensors in one memory begin at multiples of so many numbers, where vectorised kernels can read them."""


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
        copies = {own: _like(own, own.detach().float()) for own in dict.fromkeys(own for _, _, own in places)}
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
        self._trained: list[list[int]] = []
        self._pieces: list[tuple[list[_Copies], list[list[nn.Parameter]]]] = []
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
        groups, state = self._optimizer.param_groups, self._optimizer.state
        own = [group["params"] for group in groups]
        trained = [[id(each) for each in group] for group in own]
        if trained != self._trained:
            self._lay_out(own)
            self._trained = trained
        update = self._progress.updates
        self._last = (update, self._last[1] + 1 if self._last[0] == update else 0)
        try:
            for number, (places, members) in enumerate(self._pieces):
                try:
                    for copies in places:
                        copies.take(state)
                    for group, given in zip(groups, members, strict=True):
                        group["params"] = given
                    self._inner()
                finally:
                    for copies in places:
                        copies.hand_back(state)
                for place, copies in enumerate(places):
                    copies.round((*self._keys, *self._last, number, place))
        finally:
            for group, given in zip(groups, own, strict=True):
                group["params"] = given

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Divide the parameters of the groups into pieces, in which float32 copies stand for 16-bit weights.

        An optimizer that may count something for all of its parameters is given all of them at once.
        """
        divides, total = _by_parameter(self._optimizer), 0
        pieces: list[list[list[nn.Parameter]]] = [[[] for _ in groups]]
        for index, group in enumerate(groups):
            for parameter in group:
                if parameter.dtype in _DROPPED:
                    size = self._size or (PIECE_ON_CPU if parameter.device.type == "cpu" else PIECE)
                    if divides and total and total + parameter.numel() > size:
                        pieces.append([[] for _ in groups])
                        total = 0
                    total += parameter.numel()
                pieces[-1][index].append(parameter)
        self._pieces = []
        for piece in pieces:
            places: dict[Any, list[nn.Parameter]] = {}
            for each in itertools.chain.from_iterable(piece):
                if each.dtype in _DROPPED:
                    places.setdefault((each.device, each.dtype, _share(each)), []).append(each)
            copies = [_Copies(each, self._keeps) for each in places.values()]
            copy_of = {
                own: copy for each in copies for own, copy in zip(each.weights, each.copies, strict=True)
            }
            self._pieces.append((copies, [[copy_of.get(each, each) for each in group] for group in piece]))


def _by_parameter(optimizer: Optimizer) -> bool:
    """Whether it may be given its parameters part by part, as torch's own, which count for each by itself."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(map(_by_parameter, optimizer.parts))
    return isinstance(optimizer, Muon) or type(optimizer).__module__.startswith("torch.optim.")


class _Copies:
    """Float32 copies of 16-bit weights, and of their gradients while an update lasts.

    Args:
        weights: The weights: of one device, one dtype and one share of the shards.
        keeps: Whether the copies are kept from update to update, as `MASTER` in the optimizer's state.

    Attributes:
        weights: The same.
        copies: A copy of each.
    """

    def __init__(self, weights: Sequence[nn.Parameter], keeps: bool) -> None:
        self.weights = weights
        self._keeps = keeps
        self._share = _share(weights[0])
        self._values, self._gradients = _Flat(weights), _Flat(weights)
        self.copies = [_like(own, value) for own, value in zip(weights, self._values.tensors, strict=True)]
        self._kept = [each.detach() for each in self.copies]
        self._versions = [-1] * len(weights)

    def take(self, state: dict[Any, Any]) -> None:
        """Give the copies the values, the gradients and the optimizer's state of the weights."""
        self._values.allocate()
        self._gradients.allocate()
        if self._keeps:
            for index, own in enumerate(self.weights):
                self._take_kept(index, _local(own), state.get(own, {}).pop(MASTER, None))
        else:
            torch._foreach_copy_(self._values.views, [_local(each) for each in self.weights])
        targets, sources = [], []
        for index, (own, copy) in enumerate(zip(self.weights, self.copies, strict=True)):
            if own in state:
                state[copy] = state.pop(own)
            gradient: Any = own.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or (
                self._share and gradient.placements != copy.placements  # type: ignore[attr-defined]
            ):
                copy.grad = gradient.float()
                continue
            copy.grad = self._gradients.tensors[index]
            targets.append(self._gradients.views[index])
            sources.append(_local(gradient))
        if targets:
            torch._foreach_copy_(targets, sources)

    def _take_kept(self, index: int, own: Tensor, kept: Tensor | None) -> None:
        value = self._values.views[index]
        if kept is not self._kept[index]:  # the first update, or the first of a resumed run
            value.copy_(own if kept is None else _local(kept))
        # A weight that was written to since counts where it differs from its rounded copy.
        if kept is not self._kept[index] or own._version != self._versions[index]:
            torch.where(own == value.to(own.dtype), value, own.float(), out=value)

    def hand_back(self, state: dict[Any, Any]) -> None:
        """Give the weights the optimizer's state again, and free the gradients."""
        for own, copy, kept in zip(self.weights, self.copies, self._kept, strict=True):
            copy.grad = None
            if copy in state:
                state[own] = state.pop(copy)
            if self._keeps:
                state[own][MASTER] = kept
        self._gradients.free()

    def round(self, keys: Sequence[int]) -> None:
        """Give the weights the values of the copies, rounded with random numbers of these keys."""
        own = [_local(each) for each in self.weights]
        if not self._keeps:
            # Ranks that have the same share of the weights draw the same.
            seed = mix(ROUNDING, *keys, *(each + 1 for each in self._share))
            generator = torch.Generator(self._values.whole.device).manual_seed(seed)
            round_at_random_(self._values.whole, own[0].dtype, generator)
        torch._foreach_copy_(own, self._values.views)
        if self._keeps:
            self._versions = [each._version for each in own]
        else:
            self._values.free()


class _Flat:
    """Float32 tensors as large as some weights, in one memory, which they have from `allocate` to `free`.

    Args:
        weights: The weights.

    Attributes:
        whole: All numbers.
        views: The numbers of each weight, or of the part of it that is here.
        tensors: The same, sharded as the weights are.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        like = [torch.empty_like(_local(each), device="meta") for each in weights]
        starts = [0, *itertools.accumulate(-(-each.numel() // _ALIGNED) * _ALIGNED for each in like)]
        self._bytes = 4 * starts.pop()
        self.whole = torch.empty(self._bytes // 4, dtype=torch.float32, device=weights[0].device)
        self.views = [
            self.whole.as_strided(each.shape, each.stride(), start)
            for each, start in zip(like, starts, strict=True)
        ]
        self.tensors = [_sharded_as(own, view) for own, view in zip(weights, self.views, strict=True)]
        self.free()

    def allocate(self) -> None:
        """Give the tensors memory, with no values yet; those that have memory keep it."""
        self._resize(self._bytes)

    def free(self) -> None:
        """Free the memory."""
        self._resize(0)

    def _resize(self, size: int) -> None:
        if self.whole.device.type != "mps":  # where torch cannot, and the memory stays
            self.whole.untyped_storage().resize_(size)


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    copy = nn.Parameter(values)
    copy.__dict__.update(parameter.__dict__)  # what a user has noted there, to choose groups by
    return copy


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is here, in its own memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _share(parameter: Any) -> tuple[int, ...]:
    """Return which share of a sharded parameter is here: the same on ranks that have the same numbers."""
    if not hasattr(parameter, "placements"):
        return ()
    return tuple(
        -1 if placement.is_replicate() else index
        for index, placement in zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    )


def _sharded_as(parameter: Any, local: Tensor) -> Tensor:
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


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
