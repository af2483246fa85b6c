"""Random streams as functions of where the run is.

Before update `u` torch's generators, the device's included, are seeded by a function of (seed, u, rank).
Before a batch is made, in whichever process, all of the host's generators (torch's, Python's `random`,
numpy's global one) are seeded by a function of (seed, epoch, position of its first sample). Whatever draws in
between, a validation, a callback, a logger, moves nothing, and a resumed run draws what the uninterrupted one
would have drawn, without any state of torch's.

Python's and numpy's generators are not seeded before every update: it would cost 9 us, as much as all the
rest of the engine. For a step that draws from them they are a stream of their own: seeded at the start, kept
in checkpoints, and shielded from evaluation, logging and epoch hooks by `shielded`. Data that may draw from
them leaves them where making the batch left them, also when a worker made it: see `HostDraws`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from drivetrain.errors import CheckpointError

_MT19937_WORDS = 624
"""Words of the Mersenne Twister's state; the position is that of the next one, or this number."""

_MASK = (1 << 63) - 1
_MASK64 = (1 << 64) - 1
# The odd constant of a Weyl sequence, 2**64 divided by the golden ratio. Multiplying by an odd number is a
# bijection modulo 2**32, so no two updates within 2**32 share a seed even where a generator reads the lower
# 32 bits only, as torch's CPU generator does.
_WEYL = 0x9E3779B97F4A7C15

UPDATES, BATCHES, ORDER, EVALUATION, HOST, ROUNDING = range(1, 7)
"""What a stream is for: the first key of `mix`, so that streams of one seed are unrelated."""


def mix(*keys: int) -> int:
    """A 63-bit seed from whole numbers, by SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    state = 0
    for key in keys:
        state = _mixed(state, key)
    return state & _MASK


def _mixed(state: int, key: int) -> int:
    state = (state + key + 1) * _WEYL & _MASK64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
    return state ^ state >> 31


def seed_host(value: int) -> None:
    """Seed torch's CPU generator, Python's `random` and numpy's global generator."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def batch_stream(seed: int, epoch: int) -> int:
    """What the seeds of all batches of an epoch begin with; see `mix_next`."""
    return _mixed(_mixed(_mixed(0, BATCHES), seed), epoch)


def mix_next(stream: int, position: int) -> int:
    """The seed of the batch whose first sample stands at `position`: `mix` with one more key.

    Written out, because it is called for every batch.
    """
    state = (stream + position + 1) * _WEYL & _MASK64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
    return (state ^ state >> 31) & _MASK


def seed_batch(seed: int, epoch: int, position: int) -> None:
    """Seed the host's generators for making the batch whose first sample stands at `position` of `epoch`."""
    seed_host(mix_next(batch_stream(seed, epoch), position))


def seed_after(seed: int) -> None:
    """Seed the host's generators once an iterable gave the batch whose seed was `seed`.

    Whether the iterable or its workers drew for it, and how much, cannot be known; so a step begins anew, and
    not with what the batch drew.
    """
    seed_host(~seed & _MASK)


class _XLAGenerator:
    """torch_xla's random stream of a device, whose state is the seed of what is traced next."""

    def __init__(self, device: torch.device) -> None:
        import torch_xla.core.xla_model as xla

        self._xla, self._device = xla, str(device)

    def manual_seed(self, seed: int) -> None:
        """Begin a stream; the seed is an input of what is compiled, not a part of it."""
        self._xla.set_rng_state(seed, self._device)

    def get_state(self) -> torch.Tensor:
        """Where the stream stands, without a wait for the device; an unsigned number of 64 bits."""
        return torch.tensor(self._xla.get_rng_state(self._device), dtype=torch.uint64)

    def set_state(self, state: torch.Tensor) -> None:
        """Go back there."""
        self.manual_seed(int(state.numpy()))


def device_generators(device: torch.device) -> tuple[torch.Generator | _XLAGenerator, ...]:
    """The default generators of an accelerator; none for the CPU."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return (torch.cuda.default_generators[index],)
    if device.type == "mps":
        return (torch.mps._get_default_mps_generator(),)
    if device.type == "xla":
        return (_XLAGenerator(device),)
    return ()


class Streams:
    """The streams of one run on one rank.

    Args:
        seed: The run's seed.
        rank: This process's rank; ranks draw differently.
        device: Where the model runs; its generator is seeded with the host's.
    """

    def __init__(self, seed: int, rank: int = 0, device: torch.device | None = None) -> None:
        self.seed = seed
        self.rank = rank
        self._updates = mix(UPDATES, seed, rank)
        self._evaluations = mix(EVALUATION, seed, rank)
        self._seed_host = torch.default_generator.manual_seed
        self._device = device_generators(device) if device else ()

    def seed_update(self, update: int) -> None:
        """Seed torch's generators for an update."""
        value = (self._updates + update * _WEYL) & _MASK
        self._seed_host(value)
        for generator in self._device:
            generator.manual_seed(value)

    def start(self) -> None:
        """Seed everything for the beginning of a run."""
        seed_host(mix(HOST, self.seed, self.rank))

    def seed_evaluation(self, batch: int) -> None:
        """Seed torch's generators for an evaluation batch; the same in every evaluation."""
        value = (self._evaluations + batch * _WEYL) & _MASK
        self._seed_host(value)
        for generator in self._device:
            generator.manual_seed(value)

    def drawn(self) -> Callable[[], None]:
        """What puts all generators, Python's and numpy's too, back to where they stand now."""
        generators = (torch.default_generator, *self._device)
        states = [generator.get_state() for generator in generators]
        host = HostDraws()

        def put_back() -> None:
            host.restore()
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

        return put_back


def host_state() -> dict[str, Any]:
    """The states of Python's and numpy's global generators, as a checkpoint can hold them."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "position": position, "has_gauss": has_gauss, "cached": cached},
    }


def load_host_state(state: Mapping[str, Any]) -> None:
    """Take over what `host_state` gave.

    Raises:
        CheckpointError: Numbers that no generator has. Neither looks at all of them itself, and with another
            position numpy's reads memory that is not its own.
    """
    python, legacy = state["python"], state["numpy"]
    position, gauss, cached = legacy["position"], python["gauss"], legacy["cached"]
    if type(position) is not int or not 0 <= position <= _MT19937_WORDS:
        raise CheckpointError(f"the checkpoint's generator of numpy is at {str(position)[:40]}")
    if not isinstance(gauss, (float, type(None))) or not isinstance(cached, float):
        raise CheckpointError("the checkpoint's generators keep a normal number that is none")
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(
        (legacy["name"], legacy["keys"], legacy["position"], legacy["has_gauss"], legacy["cached"])
    )


class HostDraws:
    """Where Python's and numpy's global generators stand.

    A worker that made a batch sends it along when making the batch drew from them, so that this process goes
    on from there, as if it had made the batch itself. An object, not a tuple of numbers, because what pins a
    worker's tensors would walk through those.
    """

    __slots__ = ("numpy", "python")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def if_moved(self) -> HostDraws | None:
        """Where they stand now; None if that is where they stood."""
        now = HostDraws()
        same = now.python == self.python and all(map(np.array_equal, now.numpy, self.numpy))
        return None if same else now

    def restore(self) -> None:
        """Put them back there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def shielded() -> Iterator[None]:
    """Leave Python's and numpy's global generators as they were found."""
    before = HostDraws()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Leave every generator as it was found, so that a run does not move its caller's streams."""
    generators = (torch.default_generator, *(device_generators(device) if device else ()))
    states = [generator.get_state() for generator in generators]
    with shielded():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
