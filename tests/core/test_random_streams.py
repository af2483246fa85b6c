"""Random streams are functions of where the run is, and nothing else moves them."""

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint import pack, unpack
from drivetrain.core import random_streams as streams

LOW = (1 << 32) - 1  # what torch's CPU generator reads of a seed


@pytest.fixture(autouse=True)
def own_streams() -> Iterator[None]:
    with streams.preserved():
        yield


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def peeked() -> tuple[float, float, float]:
    with streams.preserved():
        return drawn()


def disturb() -> None:
    random.random()
    np.random.randn(3)  # an odd number, which leaves a cached normal value behind
    torch.rand(5)
    random.gauss(0, 1)


def test_seeds_never_change_because_resumed_runs_depend_on_them() -> None:
    # The first output of SplitMix64 from the seed 0, as its authors' implementation gives it.
    assert streams.mix(0) == 0xE220A8397B1DCDAF & (1 << 63) - 1
    found = [streams.mix(1), streams.mix(1, 2), streams.mix(1, 2, 3)]
    assert found == [7960286522194355700, 8829160048997669727, 8058178252673074585]
    assert streams.mix_next(streams.batch_stream(42, 3), 128) == 4505572615134819938
    stream = streams.Streams(seed=42, rank=1)
    stream.seed_step(1000)
    assert torch.initial_seed() == 5473434677674114338
    stream.seed_evaluation(7)
    assert torch.initial_seed() == 6063523532163842417


def test_a_seed_depends_on_every_key_and_streams_are_unrelated() -> None:
    keys = [(0,), (0, 0), (1,), (1, 0), (0, 1), (1, 2), (2, 1), (1, 2, 0), (-1,), (1 << 40, 3)]
    assert len({streams.mix(*each) for each in keys}) == len(keys)
    assert all(0 <= streams.mix(*each) < 1 << 63 for each in keys)
    kinds = [streams.STEPS, streams.BATCHES, streams.ORDER, streams.EVALUATION, streams.HOST]
    places = [(kind, seed, position) for kind in kinds for seed in range(4) for position in range(500)]
    assert len({streams.mix(*each) & LOW for each in places}) == len(places)


def seed_of(stream: streams.Streams, step: int) -> int:
    stream.seed_step(step)
    return torch.initial_seed()


def test_no_two_steps_seeds_or_ranks_share_the_bits_that_generators_read() -> None:
    stream = streams.Streams(seed=3)
    seeds = [seed_of(stream, step) & LOW for step in (*range(20_000), 1 << 31)]
    assert len({*seeds}) == len(seeds)
    for other in (streams.Streams(seed=4), streams.Streams(seed=3, rank=1)):
        assert not {*seeds} & {seed_of(other, step) & LOW for step in range(1000)}


def test_steps_and_evaluations_draw_the_same_whatever_ran_before() -> None:
    stream = streams.Streams(seed=3)
    drawn_by: dict[str, list[Tensor]] = {"step": [], "evaluation": []}
    for _ in range(2):
        for name, seed in (("step", stream.seed_step), ("evaluation", stream.seed_evaluation)):
            seed(5)
            drawn_by[name].append(torch.rand(4))
            disturb()
    (step, step_again), (evaluation, evaluation_again) = drawn_by.values()
    assert torch.equal(step, step_again)
    assert torch.equal(evaluation, evaluation_again)
    assert not torch.equal(step, evaluation)
    stream.seed_step(6)
    assert not torch.equal(torch.rand(4), step)


def test_a_run_begins_alike_and_a_step_leaves_the_host_streams_alone() -> None:
    stream = streams.Streams(seed=3)
    stream.start()
    expected = drawn()
    disturb()
    stream.start()
    stream.seed_step(0)
    stream.seed_evaluation(0)
    assert drawn()[:2] == expected[:2]
    stream.start()
    assert drawn() == expected
    streams.Streams(seed=4).start()
    assert all(new != old for new, old in zip(drawn(), expected, strict=True))


def test_a_batch_is_drawn_from_its_own_position() -> None:
    draws = {}
    for epoch in range(3):
        for position in range(0, 40, 4):
            streams.seed_batch(seed=1, epoch=epoch, position=position)
            draws[epoch, position] = drawn()
            disturb()
    for kind in range(3):
        assert len({each[kind] for each in draws.values()}) == len(draws)
    streams.seed_batch(seed=1, epoch=2, position=8)
    assert drawn() == draws[2, 8]
    stream = streams.batch_stream(9, 2)
    for at in range(5):
        assert streams.mix_next(stream, at) == streams.mix(streams.BATCHES, 9, 2, at)


def test_draws_are_noticed_and_can_be_continued_elsewhere() -> None:
    streams.seed_host(3)
    before = streams.HostDraws()
    torch.rand(3)  # torch's generator is seeded for every step and needs no note
    assert before.if_moved() is None
    for draw in (random.random, np.random.rand):
        streams.seed_host(3)
        draw()
        moved = before.if_moved()
        assert moved is not None
        expected = (random.random(), np.random.rand())
        streams.seed_host(4)
        moved.restore()
        assert (random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("shield", [streams.preserved, streams.shielded])
def test_a_shield_leaves_the_generators_as_they_were_also_after_an_error(shield: Callable[[], Any]) -> None:
    random.gauss(0, 1)  # both leave a cached value behind
    np.random.randn()
    before, expected = pickle.dumps(streams.host_state()), peeked()

    def interrupted() -> None:
        with shield():
            streams.seed_host(1)
            disturb()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert peeked()[:2] == expected[:2]
    assert pickle.dumps(streams.host_state()) == before
    assert shield is streams.shielded or peeked() == expected


def test_the_host_streams_continue_from_a_checkpoint() -> None:
    random.gauss(0, 1)  # both have now a cached value
    np.random.randn()
    stored = pack(streams.host_state())

    def draws() -> list[tuple[float, ...]]:
        kinds = random.random, np.random.randn, np.random.rand
        return [(random.gauss(0, 1), *(draw() for draw in kinds)) for _ in range(700)]

    expected = draws()
    streams.seed_host(5)
    streams.load_host_state(unpack(*stored))  # type: ignore[arg-type]
    assert draws() == expected
