"""Float32 copies of 16-bit weights, on which an optimizer makes its update, and how they are rounded back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.optimizer_state import MASTER

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 that a dtype has no room for."""

_GOLDEN = 40503
"""2**16 divided by the golden ratio, as an odd number."""

_ALIGNED = 16
"""Copies begin at multiples of so many numbers, where vectorised kernels can read them."""


def of_16_bits(parameter: Tensor) -> bool:
    """Whether it is stored in bfloat16 or float16."""
    return parameter.dtype in _DROPPED


def place_of(parameter: Tensor) -> tuple[torch.device, torch.dtype, tuple[int, ...]]:
    """Where the numbers that are here belong: parameters of one place can be rounded together.

    The last item tells which share of a sharded parameter is here. It is the same on processes that have the
    same numbers, and must round them alike.
    """
    share: tuple[int, ...] = ()
    if hasattr(parameter, "placements"):
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        coordinate = mesh.get_coordinate()
        share = tuple(
            -1 if placement.is_replicate() else index
            for index, placement in zip(coordinate, parameter.placements, strict=True)
        )
    return parameter.device, parameter.dtype, share


class Copies(ABC):
    """The float32 copies of parameters of one place, and of their gradients while an update lasts.

    Args:
        parameters: Of 16 bits, of one place.

    Attributes:
        parameters: The same.
        copies: A copy of each, sharded as it is.
        device: Where they are.
        share: Which share of sharded parameters is here; see `place_of`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.device, self._dtype, self.share = place_of(self.parameters[0])
        # Filled while an update lasts; in between they have no memory.
        self._gradients = _Flat(self.parameters)
        self._gradient_of = [
            _sharded_as(own, local) for own, local in zip(self.parameters, self._gradients.views, strict=True)
        ]
        self._values = self._make_values()
        self.copies = []
        for own, local in zip(self.parameters, self._values, strict=True):
            copy = nn.Parameter(_sharded_as(own, local))
            copy.__dict__.update(own.__dict__)
            self.copies.append(copy)

    @abstractmethod
    def _make_values(self) -> list[Tensor]:
        """What the copies consist of, one for each parameter."""

    @abstractmethod
    def _fill(self, state: Any) -> None:
        """Give the copies their values, and take out of the state what is no optimizer's."""

    @abstractmethod
    def round(self, generator: torch.Generator, turn: int) -> None:
        """Give the parameters the copies' values, rounded; see `round_at_random_`."""

    def take(self, optimizer: Optimizer) -> None:
        """Make the copies what the optimizer updates: with values, gradients and state."""
        state = optimizer.state
        self._fill(state)
        self._gradients.allocate()
        targets, sources = [], []
        for own, copy, local, gradient in zip(
            self.parameters, self.copies, self._gradients.views, self._gradient_of, strict=True
        ):
            given = own.grad
            if given is None:
                continue
            if given.layout is not torch.strided:
                copy.grad = given.float()
                continue
            targets.append(local)
            sources.append(local_of(given))
            copy.grad = gradient
        if targets:
            torch._foreach_copy_(targets, sources)
        for own, copy in zip(self.parameters, self.copies, strict=True):
            if own in state:
                state[copy] = state.pop(own)

    def hand_back(self, optimizer: Optimizer) -> None:
        """Make the parameters what the state belongs to again, and free the gradients."""
        state = optimizer.state
        for own, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None
            if copy in state:
                state[own] = state.pop(copy)
        self._gradients.free()


class PassingCopies(Copies):
    """Copies that last as long as an update, rounded to either neighbour at random."""

    def _make_values(self) -> list[Tensor]:
        self._flat = _Flat(self.parameters)
        return self._flat.views

    def _fill(self, state: Any) -> None:
        self._flat.allocate()
        torch._foreach_copy_(self._values, [local_of(each) for each in self.parameters])

    def round(self, generator: torch.Generator, turn: int) -> None:
        """To one of both neighbours."""
        round_at_random_(self._flat.whole, self._dtype, generator, turn)
        torch._foreach_copy_([local_of(each) for each in self.parameters], self._values)
        self._flat.free()


class KeptCopies(Copies):
    """Copies that are kept, as `MASTER` in the optimizer's state; the parameters are their rounded values.

    A parameter that was written to since counts, where it differs from its rounded copy.
    """

    def _make_values(self) -> list[Tensor]:
        self._versions: list[int] = [-1] * len(self.parameters)
        self._kept: list[Tensor | None] = [None] * len(self.parameters)
        return [local_of(each).float() for each in self.parameters]

    def _fill(self, state: Any) -> None:
        for index, own in enumerate(self.parameters):
            local, copy = local_of(own), self._values[index]
            found = state[own].pop(MASTER, None) if own in state else None
            loaded = found is not self._kept[index]
            if loaded and found is not None:
                copy.copy_(local_of(found))
            if loaded or local._version != self._versions[index]:
                torch.where(local == copy.to(local.dtype), copy, local.float(), out=copy)

    def round(self, generator: torch.Generator, turn: int) -> None:
        """To the nearest; no random numbers are drawn."""
        locals_ = [local_of(each) for each in self.parameters]
        torch._foreach_copy_(locals_, self._values)
        self._versions = [each._version for each in locals_]

    def hand_back(self, optimizer: Optimizer) -> None:
        """Put the copies into the state, too, from which checkpoints have them."""
        super().hand_back(optimizer)
        if self._kept[0] is None:
            self._kept = [each.detach() for each in self.copies]
        for own, kept in zip(self.parameters, self._kept, strict=True):
            optimizer.state[own][MASTER] = kept


class _Flat:
    """Float32 tensors in one piece of memory, which they have only for a while.

    Args:
        parameters: Of whose shapes and strides the tensors are; of sharded ones, of what is here.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        alike = [torch.empty_like(local_of(each), device="meta") for each in parameters]
        starts, total = [], 0
        for each in alike:
            starts.append(total)
            total += -(-each.numel() // _ALIGNED) * _ALIGNED
        device = local_of(parameters[0]).device
        self.whole = torch.empty(total, dtype=torch.float32, device=device)
        self.views = [
            self.whole.as_strided(each.shape, each.stride(), start)
            for each, start in zip(alike, starts, strict=True)
        ]
        self.free()

    def allocate(self) -> None:
        """Give them memory, with no values yet."""
        self._resize(self.whole.numel() * self.whole.itemsize)

    def free(self) -> None:
        """Take it back."""
        self._resize(0)

    def _resize(self, size: int) -> None:
        if self.whole.device.type != "mps":  # where torch cannot, and the memory stays
            self.whole.untyped_storage().resize_(size)


def local_of(tensor: Tensor) -> Tensor:
    """What is here of a tensor, in its own memory."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


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


def round_at_random_(values: Tensor, dtype: torch.dtype, generator: torch.Generator, turn: int = 0) -> None:
    """Round float32 numbers to ones that a dtype of 16 bits has, in place.

    Each becomes one of its two neighbours there, as often as it is near to it, so that the mean is the number
    itself: a random number is added to the bits that the dtype has no room for, and these are cut off.
    Numbers that the dtype has stay as they are, and NaN and infinity become NaN. Numbers of float16 below
    6e-5, whose distance is 6e-8, are left to be rounded to the nearest.

    Given the same seed, the random numbers of the turns that follow one another are spread evenly (the
    golden-ratio sequence of Weyl). A number that is added to again and again is then rounded up as often as
    it should be to within about one, where with independent ones that would wander off like a random walk.

    Args:
        values: Numbers of float32, in one piece of memory.
        dtype: bfloat16 or float16.
        generator: What to draw from, on the same device.
        turn: Where in the sequence.
    """
    dropped = _DROPPED[dtype]
    nothing = values * 0  # NaN where there is none to round: its bits could become those of a zero
    bits = values.view(torch.int32)
    # Widened here, and not by what adds them, whose memory would not be seen.
    drawn = _random_bits(values.numel(), dropped, generator, turn).to(torch.int32)
    bits.add_(drawn).add_(1 << (dropped - 1))
    bits.bitwise_and_(-1 << dropped)
    values.add_(nothing)


def _random_bits(count: int, width: int, generator: torch.Generator, turn: int) -> Tensor:
    """Whole numbers from -2**(width - 1) to below 2**(width - 1)."""
    if generator.device.type == "mps":  # which draws no 64 bits at once
        each = torch.empty(count, dtype=torch.int32, device=generator.device)
        drawn = each.random_(-(2**15), 2**15, generator=generator).to(torch.int16)
    else:
        four = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
        drawn = four.random_(-(2**63), None, generator=generator).view(torch.int16)[:count]
    drawn.add_((turn * _GOLDEN + 2**15) % 2**16 - 2**15)  # from the largest number on to the smallest
    return drawn if width == 16 else drawn.bitwise_right_shift_(16 - width)
