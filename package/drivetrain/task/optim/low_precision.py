"""Updates of 16-bit weights that are smaller than the distance to their next number.

bfloat16 keeps 8 bits of a number. The number below 1.0 is 0.996, so an update of 0.0001 that is rounded to
the nearest leaves 1.0 unchanged at every step. So the optimizer computes in float32, on copies of the
weights, and its state is float32. The result is rounded in one of two ways:

- "stochastic": to either neighbour at random, with a probability that makes the mean exact. Sources: Gupta et
  al., "Deep Learning with Limited Numerical Precision", ICML 2015; for bfloat16 Zamirai et al., "Revisiting
  BFloat16 Training", arXiv 2010.06192.
- "master": to the nearest, and the copies are kept from step to step. Source: Micikevicius et al., "Mixed
  Precision Training", arXiv 1710.03740.

torchao rounds at random too, but in a private function for bfloat16 alone that draws from the default
generator. Here the draws depend on seed and step only, and float16 works too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import ConfigError
from drivetrain.core.progress import Progress
from drivetrain.core.random_streams import ROUNDING, mix
from drivetrain.task.optim.muon import CombinedOptimizer, Muon
from drivetrain.task.optim.state import MASTER, WEIGHT_UPDATES

PIECE = 2**26
"""Weights to update at once where the optimizer allows it. Beside its state, a step needs the float32
copies of one piece and of its gradients only.
"""

PIECE_ON_CPU = 2**20
"""The same on a CPU, where a piece must fit the caches."""

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that a dtype drops."""

_ALIGNED = 16
"""Tensors in one memory begin at multiples of this number, so that vectorised kernels can read them."""


class WeightUpdates:
    """Makes optimizers of 16-bit weights compute in float32.

    Args:
        kind: "stochastic", "master" or "nearest"; "nearest" leaves optimizers unchanged.
        seed: The run's seed. Stochastic rounding draws from it.
        progress: The run's progress. With the seed and the step's number, a resumed run draws the same.
        piece: The number of weights to update at once; None uses `PIECE`, or `PIECE_ON_CPU`.
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
        """Run the block with float32 copies in place of a module's 16-bit weights, to build an optimizer on
        them.

        The optimizer then chooses its settings and kernels, and makes its first state, for float32. The
        yielded function puts the module's weights into the optimizer's groups and replaces its step by one
        for 16 bits.

        Args:
            module: The module to train, on its training device.
        """
        weights = [] if self._kind == "nearest" else list(_trained_weights(module))
        copies = {own: _like(own, own.detach().float()) for own in dict.fromkeys(own for *_, own in weights)}
        try:
            for owner, name, own in weights:
                owner._parameters[name] = copies[own]
            yield functools.partial(self._finish, copies) if weights else lambda optimizer: optimizer
        finally:
            for owner, name, own in weights:
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
        # Set on the instance, as torch's schedules do it, with the marks that they look for.
        replaced: Any = functools.wraps(optimizer.step)(functools.partial(steps.step))
        optimizer.step = replaced  # type: ignore[method-assign]
        return optimizer


def _trained_weights(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the trained 16-bit weights of a module, each with the module that holds it and its name there."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.dtype in _DROPPED:
                yield owner, name, parameter


class _Steps:
    """The steps of one optimizer, in float32.

    Args:
        size: The number of weights to update at once; None chooses by device.
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
            ConfigError: A closure was given. Its loss would use other weights than the optimizer's.
        """
        if closure is not None:
            raise ConfigError("an optimizer of 16-bit weights takes no closure: call step() without one")
        groups, state = self._optimizer.param_groups, self._optimizer.state
        own = [group["params"] for group in groups]
        trained = [[id(each) for each in group] for group in own]
        if trained != self._trained:
            self._lay_out(own)
            self._trained = trained
        step = self._progress.steps
        self._last = (step, self._last[1] + 1 if self._last[0] == step else 0)
        try:
            for number, (copied, members) in enumerate(self._pieces):
                try:
                    for copies in copied:
                        copies.take(state)
                    for group, given in zip(groups, members, strict=True):
                        group["params"] = given
                    self._inner()
                finally:
                    for copies in copied:
                        copies.hand_back(state)
                for index, copies in enumerate(copied):
                    copies.round((*self._keys, *self._last, number, index))
        finally:
            for group, given in zip(groups, own, strict=True):
                group["params"] = given

    def _divided(self, groups: Sequence[Sequence[nn.Parameter]]) -> list[list[list[nn.Parameter]]]:
        """Return the pieces, each with the parameters of every group."""
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
        return pieces

    def _lay_out(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Divide the groups' parameters into pieces, with float32 copies for 16-bit weights.

        An optimizer that may compute something over all of its parameters gets all of them at once.
        """
        self._pieces = []
        for piece in self._divided(groups):
            kinds: dict[Any, list[nn.Parameter]] = {}
            for each in itertools.chain.from_iterable(piece):
                if each.dtype in _DROPPED:
                    kinds.setdefault((each.device, each.dtype, _share(each)), []).append(each)
            copies = [_Copies(each, self._keeps) for each in kinds.values()]
            copy_of = {
                own: copy for each in copies for own, copy in zip(each.weights, each.copies, strict=True)
            }
            self._pieces.append((copies, [[copy_of.get(each, each) for each in group] for group in piece]))


def _by_parameter(optimizer: Optimizer) -> bool:
    """Return whether the optimizer can take its parameters in parts, as torch's optimizers can."""
    if isinstance(optimizer, CombinedOptimizer):
        return all(map(_by_parameter, optimizer.parts))
    return isinstance(optimizer, Muon) or type(optimizer).__module__.startswith("torch.optim.")


class _Copies:
    """Float32 copies of 16-bit weights, and of their gradients during a step.

    Args:
        keeps: Whether to keep the copies from step to step, as `MASTER` in the optimizer's state.

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
        """Copy the values, the gradients and the optimizer's state of the weights."""
        self._values.hold(True)
        self._gradients.hold(True)
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
        if kept is not self._kept[index]:  # the first step, or the first of a resumed run
            value.copy_(own if kept is None else _local(kept))
        # If a weight was written to since, its new value counts where it differs from the rounded copy.
        if kept is not self._kept[index] or own._version != self._versions[index]:
            torch.where(own == value.to(own.dtype), value, own.float(), out=value)

    def hand_back(self, state: dict[Any, Any]) -> None:
        """Return the optimizer's state to the weights, and free the gradients."""
        for own, copy, kept in zip(self.weights, self.copies, self._kept, strict=True):
            copy.grad = None
            if copy in state:
                state[own] = state.pop(copy)
            if self._keeps:
                state[own][MASTER] = kept
        self._gradients.hold(False)

    def round(self, keys: Sequence[int]) -> None:
        """Write the copies' values to the weights, rounded with random numbers of these keys."""
        own = [_local(each) for each in self.weights]
        if not self._keeps:
            # Ranks with the same share of the weights draw the same.
            seed = mix(ROUNDING, *keys, *(each + 1 for each in self._share))
            generator = torch.Generator(self._values.whole.device).manual_seed(seed)
            round_at_random_(self._values.whole, own[0].dtype, generator)
        torch._foreach_copy_(own, self._values.views)
        if self._keeps:
            self._versions = [each._version for each in own]
        else:
            self._values.hold(False)


class _Flat:
    """Float32 tensors in the shape of some weights, in one memory that exists while it is held.

    Attributes:
        whole: All numbers.
        views: The numbers of each weight, or of its local part.
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
        self.hold(False)

    def hold(self, values: bool) -> None:
        """Allocate the tensors' memory without values, or free it; memory that exists is kept."""
        if self.whole.device.type != "mps":  # torch cannot resize there, and the memory stays
            self.whole.untyped_storage().resize_(self._bytes if values else 0)


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    copy = nn.Parameter(values)
    copy.__dict__.update(parameter.__dict__)  # a user's notes, by which groups may be chosen
    return copy


def _local(tensor: Any) -> Tensor:
    """Return the local part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _share(parameter: Any) -> tuple[int, ...]:
    """Return the index of the local share of a sharded parameter; equal on ranks with equal numbers."""
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
    """Round float32 numbers in place to numbers that a 16-bit dtype can hold.

    Each number becomes one of its two neighbours there, with a probability that makes the mean exact. A
    random number is added to the bits that the dtype drops, and these are cut off. Numbers that the dtype can
    hold stay unchanged, and NaN and infinity become NaN. float16 numbers below 6e-5, where the distance is
    6e-8, are rounded to the nearest.
    """
    dropped = _DROPPED[dtype]
    nothing = values * 0  # NaN where there is no number to round: its bits could become those of a zero
    bits = values.view(torch.int32)
    bits.add_(torch.empty_like(bits).random_(0, 1 << dropped, generator=generator))
    bits.bitwise_and_(-1 << dropped)
    values.add_(nothing)
