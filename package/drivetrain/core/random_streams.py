"""Random streams as functions of a run's progress.

Before step `u`, torch's generators on the host and the device are seeded by a function of (seed, u, rank).
Before a batch is loaded, in whichever process, all of the host's generators (torch's, Python's `random`,
numpy's global one) are seeded by a function of (seed, epoch, position of its first sample). Draws in between,
by a validation, a callback or a logger, move nothing. A resumed run draws the same numbers as an
uninterrupted one, without saving the state of torch's generators.

Python's and numpy's generators are not seeded before every step: it would cost 9 us, as much as all the
rest of the engine. They are a separate stream for steps that draw from them: seeded at the start, saved in
checkpoints, and protected from evaluation, logging and epoch hooks by `shielded`. If loading a batch draws
from them, training continues from their state after that batch, even if a worker loaded it: see `peek`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from drivetrain.core.errors import CheckpointError

_MT19937_WORDS = 624
"""Words of the Mersenne Twister's state. The position is the index of the next word, or this number."""

_LEGACY = ("name", "keys", "position", "has_gauss", "cached")
"""The parts of the state of numpy's global generator, in numpy's order."""

_MASK = (1 << 63) - 1
_MASK64 = (1 << 64) - 1
# The odd constant of a Weyl sequence, 2**64 divided by the golden ratio. Multiplying by an odd number is a
# bijection modulo 2**32. So no two steps within 2**32 share a seed, even in a generator that reads only the
# lower 32 bits, as torch's CPU generator does.
_WEYL = 0x9E3779B97F4A7C15

STEPS, BATCHES, ORDER, EVALUATION, HOST, ROUNDING = range(1, 7)
"""Purposes of streams. Each is the first key of `mix`, so that streams of one seed are unrelated."""


def mix(*keys: int) -> int:
    """Return a 63-bit seed from integers, by SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
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
    """Return the common state of the seeds of an epoch's batches; see `mix_next`."""
    return _mixed(_mixed(_mixed(0, BATCHES), seed), epoch)


def mix_next(stream: int, position: int) -> int:
    """Return the seed of the batch whose first sample is at `position`: `mix` with one more key.

    Inlined, because it is called for every batch.
    """
    state = (stream + position + 1) * _WEYL & _MASK64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
    return (state ^ state >> 31) & _MASK


def seed_batch(seed: int, epoch: int, position: int) -> None:
    """Seed the host's generators for loading the batch whose first sample is at `position` of `epoch`."""
    seed_host(mix_next(batch_stream(seed, epoch), position))


def seed_after(seed: int) -> None:
    """Seed the host's generators for the step after an iterable has returned the batch of `seed`.

    Nobody knows whether, and how much, the iterable or its workers drew. So the step starts a new stream
    instead of continuing the batch's.
    """
    seed_host(~seed & _MASK)


class _XLAGenerator:
    """torch_xla's random stream of a device. Its state is the seed of the next traced graph."""

    def __init__(self, device: torch.device) -> None:
        import torch_xla.core.xla_model as xla

        self._xla, self._device = xla, str(device)

    def manual_seed(self, seed: int) -> None:
        """Start a stream. The seed is an input of the compiled graph, so a new seed compiles nothing."""
        self._xla.set_rng_state(seed, self._device)

    def get_state(self) -> torch.Tensor:
        """Return the state, an unsigned 64-bit number, without waiting for the device."""
        return torch.tensor(self._xla.get_rng_state(self._device), dtype=torch.uint64)

    def set_state(self, state: torch.Tensor) -> None:
        self.manual_seed(int(state.numpy()))


def device_generators(device: torch.device) -> tuple[torch.Generator | _XLAGenerator, ...]:
    """Return the default generators of an accelerator; empty for the CPU."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return (torch.cuda.default_generators[index],)
    if device.type == "xpu":
        torch.xpu.init()
        return (torch.xpu.default_generators[device.index or 0],)
    if device.type == "mps":
        return (torch.mps._get_default_mps_generator(),)
    if device.type == "xla":
        return (_XLAGenerator(device),)
    return ()


class Streams:
    """The random streams of one run on one rank.

    Args:
        seed: The run's seed.
        rank: This process's rank; ranks draw different numbers.
        device: The model's device; its generator is seeded with the host's.
        drawing: The number of the stream of steps and evaluations, if it is not the rank.
    """

    def __init__(
        self, seed: int, rank: int = 0, device: torch.device | None = None, drawing: int | None = None
    ) -> None:
        self.seed = seed
        self.rank = rank
        drawing = rank if drawing is None else drawing
        self._steps = mix(STEPS, seed, drawing)
        self._evaluations = mix(EVALUATION, seed, drawing)
        self._seed_host = torch.default_generator.manual_seed
        self._device = device_generators(device) if device else ()

    def seed_step(self, step: int) -> None:
        """Seed torch's generators for a step."""
        value = (self._steps + step * _WEYL) & _MASK
        self._seed_host(value)
        for generator in self._device:
            generator.manual_seed(value)

    def start(self) -> None:
        """Seed all of the host's generators at the start of a run."""
        seed_host(mix(HOST, self.seed, self.rank))

    def seed_evaluation(self, batch: int) -> None:
        """Seed torch's generators for an evaluation batch; the same in every evaluation."""
        value = (self._evaluations + batch * _WEYL) & _MASK
        self._seed_host(value)
        for generator in self._device:
            generator.manual_seed(value)


def host_state() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators in a form that a checkpoint can store."""
    version, words, gauss = random.getstate()
    return {
        "python": {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss},
        "numpy": dict(zip(_LEGACY, np.random.get_state(legacy=True), strict=True)),
    }


def load_host_state(state: Mapping[str, Any]) -> None:
    """Load the states that `host_state` returned.

    Raises:
        CheckpointError: Values that no generator can have. Neither library checks all of them, and with a
            position out of range numpy reads beyond its buffer.
    """
    python, legacy = state["python"], state["numpy"]
    position, gauss, cached = legacy["position"], python["gauss"], legacy["cached"]
    if type(position) is not int or not 0 <= position <= _MT19937_WORDS:
        raise CheckpointError(f"the checkpoint's generator of numpy is at {str(position)[:40]}")
    if not isinstance(gauss, (float, type(None))) or not isinstance(cached, float):
        raise CheckpointError("the checkpoint's generators keep a normal number that is none")
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(tuple(legacy[each] for each in _LEGACY))


def generator_state(
    generator: torch.Generator | random.Random | np.random.Generator | np.random.RandomState,
) -> Any:
    """Return the state of a user's generator in a form that a checkpoint can store."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, dtype=np.int64), "gauss": gauss}
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def load_generator_state(
    generator: torch.Generator | random.Random | np.random.Generator | np.random.RandomState, state: Any
) -> None:
    """Load a state that `generator_state` returned for a generator of the same kind.

    Raises:
        CheckpointError: A position that no generator can have; numpy would read beyond its buffer.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    else:
        inner = state["state"]
        for position, most in ((inner.get("pos", 0), _MT19937_WORDS), (state.get("buffer_pos", 0), 4)):
            if not isinstance(position, int) or not 0 <= position <= most:
                raise CheckpointError(f"the checkpoint's generator of numpy is at {str(position)[:40]}")
        if isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def peek() -> tuple[int, float]:
    """Draw a number from Python's and numpy's generators, which shows whether a batch has moved them.

    A worker sends their states, which take 200 us to copy, only if the batch of that seed drew from them. The
    process that trains draws the same number after a batch, whoever made it.
    """
    return random.getrandbits(64), np.random.random()


class HostDraws:
    """A snapshot of Python's and numpy's global generators.

    It is an object, not a tuple of numbers, because the code that pins a worker's tensors would walk through
    a tuple.
    """

    __slots__ = ("numpy", "python")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state()

    def if_moved(self) -> HostDraws | None:
        """Return a snapshot of the generators now, or None if they have not moved since this one."""
        now = HostDraws()
        same = now.python == self.python and all(map(np.array_equal, now.numpy, self.numpy))
        return None if same else now

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def shielded() -> Iterator[None]:
    """Run the block with Python's and numpy's global generators restored at its end."""
    before = HostDraws()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def preserved(device: torch.device | None = None, others: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Run the block with every generator restored at its end, so that a run moves no stream of its caller.

    Args:
        device: The device whose generator is restored too.
        others: More generators to restore.
    """
    generators = (torch.default_generator, *(device_generators(device) if device else ()), *others)
    states = [generator.get_state() for generator in generators]
    with shielded():
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
